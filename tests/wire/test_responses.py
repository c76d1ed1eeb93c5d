"""`/v1/responses` without a server: what is read, the event sequence, releases, the store."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.env import ServerEnv, Stored, counting_ids
from windtunnel.wire.family import Delta, Generation, Usage, WireError
from windtunnel.wire.vllm import responses
from windtunnel.wire.vllm.responses_in import conversation

JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HERMES: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


class Store(dict[str, Stored]):
    def put(self, response_id: str, stored: Stored) -> None:
        self[response_id] = stored


def environment(**options: Any) -> ServerEnv:
    return ServerEnv(("m",), BuiltinTokenizer(), 512, counting_ids(), lambda: 0, **options)


def plan(env: ServerEnv, **body: Any) -> Generation:
    return responses.plan(json.dumps({"input": "hi"} | body).encode(), JSON, env)


def events(frames: bytes) -> list[dict[str, Any]]:
    parts = [part.split(b"\ndata: ", 1) for part in frames.split(b"\n\n") if part]
    values = [json.loads(data) for _name, data in parts]
    assert [name.removeprefix(b"event: ").decode() for name, _data in parts] == [value["type"] for value in values]
    return values


def streamed(generation: Generation, texts: Sequence[str], finish: str = "stop") -> list[dict[str, Any]]:
    encoder = responses.ResponseEncoder(generation.spec)
    usage = Usage(3, len(texts))
    frames = [encoder.opening(), *(encoder.delta(delta, usage) for delta in _deltas(texts, finish)), encoder.close(usage)]
    return events(b"".join(frames))


def _deltas(texts: Sequence[str], finish: str) -> Iterator[Delta]:
    for text in texts:
        yield Delta(0, text, (50,))
    yield Delta(0, "", (50,), finish_reason=finish)


def test_a_stream_is_numbered_and_has_its_text_three_times() -> None:
    told = streamed(plan(environment()), ["a", "b"])
    assert [event["sequence_number"] for event in told] == list(range(10))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert told[6]["text"] == told[7]["part"]["text"] == told[9]["response"]["output"][0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize(("version", "last"), [("0.32.0", "response.completed"), ("0.33.0", "response.incomplete")])
def test_the_last_event_at_the_token_limit_depends_on_the_release(version: str, last: str) -> None:
    told = streamed(plan(environment(version=version)), ["a"], finish="length")[-1]
    assert told["type"] == last and told["response"]["status"] == "incomplete"
    assert told["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert ("prompt_cache_key" in told["response"]) == (version == "0.33.0")


def test_an_operators_abort_is_told_as_completed() -> None:
    told = streamed(plan(environment()), ["a"], finish="abort")[-1]
    assert told["type"] == "response.completed" and told["response"]["status"] == "completed"


def test_reasoning_text_and_a_call_are_three_items() -> None:
    generation = plan(environment(reasoning_parser="qwen3", **HERMES), tools=[TOOL])
    said = ["<think>why</think>", "so", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>']
    told = streamed(generation, said)
    output = told[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[2]["arguments"] == '{"a": 1}' and output[2]["name"] == "f"
    added = [event["item"]["id"] for event in told if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in output]
    assert [event["output_index"] for event in told if event["type"] == "response.output_item.done"] == [0, 1, 2]


def test_an_error_cuts_the_stream() -> None:
    assert responses.ResponseEncoder(plan(environment()).spec).error(WireError("no")) is None


def test_a_background_run_goes_from_in_progress_to_failed_in_the_store() -> None:
    store = Store()
    generation = plan(environment(stored=store), background=True)
    encoder = responses.ResponseEncoder(generation.spec)
    encoder.opening()
    assert store[generation.response_id].body["status"] == "in_progress"
    encoder.error(WireError("no"))
    assert store[generation.response_id].body["status"] == "failed"


def test_a_cancelled_response_stays_cancelled() -> None:
    store = Store()
    generation = plan(environment(stored=store), background=True)
    store.put(generation.response_id, Stored(responses.response_value(generation.spec, "cancelled"), ()))
    streamed(generation, ["a"])
    assert store[generation.response_id].body["status"] == "cancelled"


def test_store_false_is_not_stored() -> None:
    store = Store()
    streamed(plan(environment(stored=store), store=False), ["a"])
    assert not store


def test_the_previous_conversation_comes_without_its_instructions() -> None:
    store = Store()
    env = environment(stored=store)
    first = plan(env, instructions="be odd")
    streamed(first, ["answer"])
    second = plan(env, previous_response_id=first.response_id, input="more")
    assert [(message["role"], message["content"]) for message in second.spec.messages] == [
        ("user", "hi"),
        ("assistant", [{"type": "text", "text": "answer"}]),
        ("user", "more"),
    ]
    assert "be odd" not in str(second.prompts[0].text)


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"background": True}, 400, "invalid_request_error", "background"),
        ({"previous_response_id": "resp_x"}, 404, "invalid_request_error", "response_id"),
        ({"model": "other"}, 404, "NotFoundError", "model"),
        ({"prompt": {"id": "x"}}, 400, "BadRequestError", "prompt"),
        ({"max_output_tokens": 513}, 400, "BadRequestError", "max_output_tokens"),
        ({"input": [{"type": "image_generation_call"}]}, 400, "BadRequestError", "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "BadRequestError", "input"),
        ({"tools": [{"type": "function"}]}, 400, "Bad Request", "body.tools.0.FunctionTool.name"),
        ({"tool_choice": "required"}, 400, "BadRequestError", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, 400, "BadRequestError", "tool_choice"),
        ({"background": True, "store": False}, 400, "BadRequestError", "background"),
    ],
)
def test_refusals(body: dict[str, Any], status: int, kind: str, param: str) -> None:
    with pytest.raises(WireError) as refused:
        plan(environment(), **body)
    assert (refused.value.status, refused.value.kind, refused.value.param) == (status, kind, param)


def test_a_prompt_that_fills_the_context_is_an_invalid_request() -> None:
    env = environment()
    size = len(plan(env).prompts[0].token_ids)
    with pytest.raises(WireError) as refused:
        plan(replace(env, max_model_len=size))
    assert refused.value.status == 400


def test_reasoning_and_calls_in_a_row_are_one_assistant_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    made = conversation(
        [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            call,
            call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool"]
    assert made[1]["reasoning"] == "hm" and [one["id"] for one in made[1]["tool_calls"]] == ["c1", "c2"]


def test_auto_tools_without_a_parser_stay_text() -> None:
    generation = plan(environment(), tools=[TOOL])
    told = streamed(generation, ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'])
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["message"]
