"""`/v1/messages` without a server: conversations, events, error envelopes by release."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.env import ServerEnv, counting_ids
from windtunnel.wire.family import Delta, Generation, Usage, WireError
from windtunnel.wire.vllm import messages
from windtunnel.wire.vllm.messages_stream import MessageEncoder

JSON = {"content-type": "application/json"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HERMES: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def environment(**options: Any) -> ServerEnv:
    return ServerEnv(("m",), BuiltinTokenizer(), 512, counting_ids(), lambda: 0, **options)


def plan(env: ServerEnv, **body: Any) -> Generation:
    told = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50} | body
    return messages.plan(json.dumps(told).encode(), JSON, env)


def events(frames: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.split(b"\ndata: ", 1)[1]) for part in frames.split(b"\n\n") if part]


def streamed(generation: Generation, texts: Sequence[str], finish: str, stop: int | str | None = None) -> list[dict[str, Any]]:
    encoder = MessageEncoder(generation.spec)
    usage = Usage(30, len(texts), cached_tokens=16, created_cache_tokens=4)
    deltas = [Delta(0, text, (50,)) for text in texts] + [Delta(0, "", (50,), finish_reason=finish, stop_reason=stop)]
    return events(b"".join(encoder.delta(delta, usage) for delta in deltas) + encoder.close(usage))


def test_each_kind_of_output_is_a_block() -> None:
    generation = plan(environment(reasoning_parser="qwen3", **HERMES), tools=[TOOL])
    said = ["<think>why</think>", "so", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>']
    told = streamed(generation, said, "stop")
    starts = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == [0, 1, 2]
    kinds = [event["delta"]["type"] for event in told if event["type"] == "content_block_delta"]
    assert kinds.index("signature_delta") == kinds.index("text_delta") - 1
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("finish", "stop", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "How", ("stop_sequence", "How")),
        ("length", None, ("max_tokens", None)),
        ("abort", None, (None, None)),
    ],
)
def test_how_a_message_ends(finish: str, stop: int | str | None, told: tuple[str | None, str | None]) -> None:
    last = streamed(plan(environment()), ["a"], finish, stop)[-2]
    assert (last["delta"]["stop_reason"], last["delta"]["stop_sequence"]) == told


@pytest.mark.parametrize("details", [True, False])
def test_usage_splits_the_prompt_only_with_details(details: bool) -> None:
    usage = streamed(plan(environment(enable_prompt_tokens_details=details)), ["a"], "stop")[-2]["usage"]
    split = {"input_tokens": 10, "output_tokens": 1, "cache_creation_input_tokens": 4, "cache_read_input_tokens": 16}
    assert usage == (split if details else {"input_tokens": 30, "output_tokens": 1})


@pytest.mark.parametrize("started", [True, False])
def test_an_error_closes_the_open_block_and_is_the_last_event(started: bool) -> None:
    encoder = MessageEncoder(plan(environment()).spec)
    if started:
        encoder.delta(Delta(0, "a", (50,)), Usage(3, 1))
    told = events(encoder.error(WireError("EngineCore encountered an issue", 500, "InternalServerError")))
    assert [event["type"] for event in told] == (["content_block_stop"] if started else []) + ["error"]
    assert told[-1]["error"] == {"type": "api_error", "message": "EngineCore encountered an issue"}


@pytest.mark.parametrize(("version", "kind"), [("0.32.0", "NotFoundError"), ("0.33.0", "not_found_error")])
def test_the_error_type_depends_on_the_release(version: str, kind: str) -> None:
    with pytest.raises(WireError) as refused:
        plan(environment(version=version), model="other")
    assert json.loads(messages.error_body(refused.value)) == {
        "type": "error",
        "error": {"type": kind, "message": refused.value.message},
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (413, "request_too_large"),
        (503, "overloaded_error"),
        (500, "api_error"),
        (403, "permission_error"),
        (429, "rate_limit_error"),
    ],
)
def test_later_errors_are_named_by_their_status(status: int, kind: str) -> None:
    assert json.loads(messages.error_body(WireError("x", status, "Whatever")))["error"]["type"] == kind


def test_validation_keeps_the_openai_envelope() -> None:
    with pytest.raises(WireError) as refused:
        plan(environment(), max_tokens=0)
    told = json.loads(messages.error_body(refused.value))
    assert list(told) == ["error"] and told["error"]["type"] == "Bad Request"


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": [TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": []},
        {"model": ""},
        {"stop_sequences": ["a"] * 5},
    ],
)
def test_bad_requests(body: dict[str, Any]) -> None:
    with pytest.raises(WireError) as refused:
        plan(environment(), **body)
    assert refused.value.status == 400


def test_tool_results_become_messages_of_their_own() -> None:
    turns = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "12"}, {"type": "text", "text": "go on"}],
        },
    ]
    request = messages.MessagesRequest.model_validate({"model": "m", "messages": turns, "max_tokens": 5, "system": "s"})
    made = messages.chat_request(request, environment()).messages
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "user"]
    assert made[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'} and made[2]["reasoning"] == "hm"


def test_counting_counts_what_a_message_would_read() -> None:
    env = environment()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    status, told = messages.count_tokens(body, JSON, env)
    count = len(plan(env).prompts[0].token_ids)
    assert status == 200 and json.loads(told) == {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def test_a_plain_frame_is_the_one_that_the_encoder_writes() -> None:
    encoder = MessageEncoder(plan(environment()).spec)
    assert encoder.plain(0) is None
    encoder.delta(Delta(0, "a", (50,)), Usage(3, 1))
    around = encoder.plain(0)
    assert around is not None
    assert around[0] + b'" b"' + around[1] == encoder.delta(Delta(0, " b", (50,)), Usage(3, 2))
