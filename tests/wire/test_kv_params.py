"""`kv_transfer_params` in and out of each API family: unary answers carry them, streams do not (vLLM reference §7.2)."""

import json
from typing import Any

import pytest
from tests.core.vllm.kv_rig import NULLS, Pair
from tests.wire.vllm_env import TOKENIZER, env, plan, stream

from windtunnel.core.outputs import FinishReason, TokenOutput
from windtunnel.serve.streams import CollectedAnswer
from windtunnel.wire.family import ChoiceResult, Delta, SamplingPlan, Usage
from windtunnel.wire.output import ChoiceState
from windtunnel.wire.vllm import chat, completions, generate, messages, responses

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[Any, dict[str, Any]] = {
    completions: {"prompt": "a"},
    chat: {"messages": HELLO},
    messages: {"model": "m", "messages": HELLO, "max_tokens": 1},
    responses: {"input": "hello"},
    generate: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
}
SERVER = env(enable_scale_out=True)
by_name = pytest.mark.parametrize("family", BODIES, ids=lambda family: family.__name__.rpartition(".")[2])


def params() -> dict[str, Any]:
    """What a prefill answers."""
    told = Pair().prefill("a")
    assert told is not None
    return dict(told)


def unary(family: Any, kv_transfer: dict[str, Any] | None) -> dict[str, Any]:
    generation = plan(family, BODIES[family], SERVER)
    choice = ChoiceResult(0, 0, " word", (400,), "length", None)
    told: dict[str, Any] = json.loads(family.body(generation, [choice], Usage(2, 1, kv_transfer=kv_transfer)))
    return told


@by_name
def test_the_request_takes_them_to_the_engine(family: Any) -> None:
    assert plan(family, {**BODIES[family], "kv_transfer_params": NULLS}, SERVER).kv_transfer == NULLS
    assert plan(family, BODIES[family], SERVER).kv_transfer is None


@by_name
def test_a_unary_answer_carries_them(family: Any) -> None:
    told = params()
    assert unary(family, told)["kv_transfer_params"] == told


@by_name
def test_without_a_hold_they_are_null(family: Any) -> None:
    """Messages leaves nulls out."""
    answer = unary(family, None)
    assert ("kv_transfer_params" in answer) == (family is not messages)
    assert answer.get("kv_transfer_params") is None


@pytest.mark.parametrize("family", [completions, chat])
def test_a_stream_does_not(family: Any) -> None:
    generation = plan(family, {**BODIES[family], "stream": True, "kv_transfer_params": NULLS}, SERVER)
    frames = stream(family, generation, Delta(0, " x", (1,), finish_reason="length"))
    assert all(frame.get("kv_transfer_params") is None for frame in frames if isinstance(frame, dict))
    assert "remote_block_ids" not in json.dumps(frames)


def test_the_answer_names_the_first_prompt_and_of_its_choices_the_one_that_ended_last() -> None:
    usage = Usage(2, 0)
    sampling = SamplingPlan(max_tokens=1, n=2)
    choices = [ChoiceState(at, at // 2, sampling, TOKENIZER) for at in range(4)]
    answer = CollectedAnswer(choices, usage, lambda: None)
    for at in (1, 0, 2, 3):
        answer.on_output(
            choices[at], TokenOutput(str(at), (400,), FinishReason.LENGTH, kv_transfer={"remote_request_id": str(at)})
        )
    assert usage.kv_transfer == {"remote_request_id": "0"}
