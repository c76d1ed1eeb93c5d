"""Derender of a stream, chunk by chunk: the client carries the state through JSON (vLLM 0.33, `DerenderStreamState`)."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.vllm_env import JSON, TOKENIZER, env

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm.derender import ROUTES
from windtunnel.wire.vllm.parsers import HermesParser

CHAT, COMPLETIONS = "/v1/chat/completions/derender", "/v1/completions/derender"
EOS = TOKENIZER.eos_token_id
ON = env(enable_scale_out=True, reasoning_parser=None, tool_call_parser=None)
PARSING = env(enable_scale_out=True, reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


def call(path: str, told: dict[str, Any], known: ServerEnv = ON) -> Any:
    return json.loads(ROUTES[path](json.dumps(told | {"stream": True}).encode(), JSON, known))


def refusal(path: str, told: dict[str, Any], known: ServerEnv = ON) -> str:
    with pytest.raises(WireError) as refused:
        call(path, told, known)
    assert refused.value.status == 400
    return refused.value.message


def part(ids: Sequence[int], **members: Any) -> dict[str, Any]:
    return {"request_id": "r", "choices": [{"index": 0, "token_ids": list(ids), **members}]}


def derendered(path: str, parts: Iterable[dict[str, Any]], known: ServerEnv = ON, **told: Any) -> list[Any]:
    """The chunks of a stream, each call with the state of the one before."""
    state, made = None, []
    for one in parts:
        answer = call(path, {"generate_chunk": one, "stream_state": state, **told}, known)
        state = answer["stream_state"]
        made.append(answer["chunk"])
    return made


def text_of(made: Sequence[Any]) -> str:
    return "".join(choice["text"] for chunk in made for choice in chunk["choices"])


def pieces(ids: Sequence[int], size: int) -> list[dict[str, Any]]:
    return [part(ids[at : at + size]) for at in range(0, len(ids), size)]


@given(st.text(max_size=30), st.integers(1, 5), st.text(max_size=4))
def test_the_text_is_that_of_all_tokens_at_once(text: str, size: int, prompt: str) -> None:
    """Characters of several tokens are split over the chunks."""
    ids = TOKENIZER.encode(text)
    told = {"prompt_token_ids": TOKENIZER.encode(prompt)}
    assert text_of(derendered(COMPLETIONS, pieces(ids, size), **told)) == TOKENIZER.decode(ids)


def test_the_state_is_a_window_that_does_not_grow() -> None:
    ids = [*TOKENIZER.encode(" orange holly balcony" * 20), *TOKENIZER.encode("🌬"), *[EOS] * 50]
    state = None
    for one in pieces(ids, 3):
        state = call(COMPLETIONS, {"generate_chunk": one, "stream_state": state})["stream_state"]
        assert len(state["prev_tokens"]) <= 8
        assert state["read_offset"] <= len(state["prev_tokens"])
    assert set(state) == {
        "prev_tokens", "prefix_offset", "read_offset", "role_sent", "logprob_context_token_ids", "logprob_text_offset",
        "output_token_ids", "output_chunk_lens", "tools_streamed", "last_tool_call_ids",
    }  # fmt: skip


def test_a_chat_chunk_member_by_member() -> None:
    first, second = TOKENIZER.encode(" a holly")
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    one, two, three = derendered(
        CHAT,
        [part([first]), part([second, EOS], finish_reason="stop"), {"request_id": "r", "choices": [], "usage": usage}],
        chat_request={"messages": ASKED["messages"], "return_token_ids": True},
    )
    assert list(one) == [
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint", "prompt_token_ids", "prompt_text",
        "metrics", "kv_transfer_params",
    ]  # fmt: skip
    assert one["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": " a", "reasoning": None},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [first],
            "weight_versions": None,
        }
    ]
    (choice,) = two["choices"]
    assert choice["delta"] == {"role": None, "content": " holly", "reasoning": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", None, [second, EOS])
    assert (three["choices"], three["usage"]["total_tokens"]) == ([], 5)


def test_a_completion_chunk_has_the_offsets_of_the_whole_text() -> None:
    ids = TOKENIZER.encode(" a holly orange")
    entries = [{"token_id": token, "logprob": -0.5, "top_logprobs": [{"token_id": token, "logprob": -0.5}]} for token in ids]
    parts = [part([token], logprobs={"content": [entry]}) for token, entry in zip(ids, entries, strict=True)]
    made = derendered(COMPLETIONS, parts, completion_request={"prompt": "x", "logprobs": 0})
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in made] == [[0], [2], [8]]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in made] == [[" a"], [" holly"], [" orange"]]
    assert list(made[0]["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids", "weight_versions",
    ]  # fmt: skip


def test_the_token_that_ended_an_answer_has_no_text() -> None:
    ids = TOKENIZER.encode(" a holly")
    ended = [part(ids[:1]), part(ids[1:], finish_reason="stop", stop_reason=ids[-1])]
    assert text_of(derendered(COMPLETIONS, ended)) == " a"
    shown = {"prompt": "x", "include_stop_str_in_output": True}
    assert text_of(derendered(COMPLETIONS, ended, completion_request=shown)) == " a holly"
    named = [part(ids, finish_reason="stop")]
    (made,) = derendered(COMPLETIONS, named, completion_request={"prompt": "x", "stop_token_ids": [ids[-1]]})
    assert (made["choices"][0]["text"], made["choices"][0]["stop_reason"]) == (" a", ids[-1])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_parsed_stream_says_what_a_live_one_says(size: int) -> None:
    said = '<think>why</think>so<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parts = pieces(TOKENIZER.encode(said), size)
    parts.append(part([EOS], finish_reason="stop"))
    made = derendered(CHAT, parts, PARSING, chat_request=ASKED, prompt_token_ids=[])
    deltas = [chunk["choices"][0]["delta"] for chunk in made]
    assert "".join(delta["reasoning"] or "" for delta in deltas) == "why"
    assert "".join(delta["content"] or "" for delta in deltas) == "so"
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert {one["index"] for one in calls} == {0}
    assert [one["function"]["name"] for one in calls if one["id"]] == ["f"]
    assert json.loads("".join(one["function"]["arguments"] or "" for one in calls)) == {"a": 1}
    assert [delta["role"] for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert made[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_keeps_the_id_that_it_was_given() -> None:
    first, second = ('<tool_call>{"name": "f", "arguments": {}}</tool_call>',) * 2
    parts = [part(TOKENIZER.encode(f"</think>{first}")), part(TOKENIZER.encode(second)), part([EOS], finish_reason="stop")]
    state, ids = None, []
    for one in parts:
        told = {"generate_chunk": one, "stream_state": state, "chat_request": ASKED, "prompt_token_ids": []}
        answer = call(CHAT, told, PARSING)
        state = answer["stream_state"]
        ids += [one["id"] for one in answer["chunk"]["choices"][0]["delta"].get("tool_calls", ())]
    assert state["last_tool_call_ids"] == ids and len(set(ids)) == 2
    assert state["tools_streamed"] and sum(state["output_chunk_lens"]) == len(state["output_token_ids"])


def test_hidden_reasoning_has_neither_text_nor_tokens_nor_logprobs() -> None:
    ids = TOKENIZER.encode("<think>why</think>so")
    entry = {"token_id": ids[0], "logprob": -1.0}
    asked = {**ASKED, "include_reasoning": False, "return_token_ids": True, "logprobs": True}
    one = part(ids, logprobs={"content": [entry]})
    (made,) = derendered(CHAT, [one], PARSING, chat_request=asked, prompt_token_ids=[])
    (choice,) = made["choices"]
    assert choice["delta"] == {"role": "assistant", "content": "so", "reasoning": None}
    assert (choice["logprobs"], choice["token_ids"]) == (None, None)


def test_what_a_chunk_cannot_ask() -> None:
    one = part([400])
    two = {"request_id": "r", "choices": [{"index": 0}, {"index": 1}]}
    for path, request in (
        (CHAT, {"chat_request": ASKED | {"stop": ["x"]}}),
        (COMPLETIONS, {"completion_request": {"prompt": "x", "stop": "x"}}),
    ):
        assert refusal(path, {"generate_chunk": one, **request}).startswith("stop strings are not supported")
        assert "expects at most one choice per chunk" in refusal(path, {"generate_chunk": two})
        assert "out of vocabulary" in refusal(path, {"generate_chunk": part([10**9])})
        assert "output_mode" in refusal(path, {"generate_chunk": one | {"output_mode": "text"}})
        assert "exceeds" in refusal(path, {"generate_chunk": one, "prompt_token_ids": [5] * 257})
    assert "chat_request is required" in refusal(CHAT, {"generate_chunk": one}, PARSING)
    assert "prompt_token_ids is required" in refusal(CHAT, {"generate_chunk": one, "chat_request": ASKED}, PARSING)
    long = {"output_token_ids": [400] * 256, "output_chunk_lens": [256]}
    told = {"generate_chunk": one, "chat_request": ASKED, "prompt_token_ids": [5], "stream_state": long}
    assert "plus output_token_ids length (256) plus delta (1)" in refusal(CHAT, told, PARSING)


@pytest.mark.parametrize(
    "state",
    [
        {"prev_tokens": ["x"] * 1025},
        {"prev_tokens": ["x"]},
        {"prev_tokens": ["9" * 30]},
        {"prev_tokens": ["400"], "read_offset": 2},
        {"prev_tokens": ["400"], "read_offset": 0, "prefix_offset": 1},
        {"prev_tokens": [str(10**9)]},
        {"output_token_ids": [1], "output_chunk_lens": [2]},
        {"output_token_ids": [10**9], "output_chunk_lens": [1]},
        {"logprob_context_token_ids": [1] * 5},
        {"read_offset": -1},
    ],
    ids=lambda state: "-".join(state),
)
def test_a_state_that_no_call_has_given_is_a_400(state: dict[str, Any]) -> None:
    assert refusal(COMPLETIONS, {"generate_chunk": part([400]), "stream_state": state})


@pytest.mark.parametrize("name", ["a\\qb", "a\nb"])
def test_a_call_s_name_that_is_no_json_is_shown_as_it_stands(name: str) -> None:
    ids = TOKENIZER.encode(f'</think><tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    (made,) = derendered(CHAT, [part(ids)], PARSING, chat_request=ASKED, prompt_token_ids=[])
    (shown,) = (choice["delta"]["tool_calls"] for choice in made["choices"])
    assert [call["function"]["name"] for call in shown] == [name]


@pytest.mark.parametrize("begun", ["", '"name": "f', '"name": "f"', '"name": "f", "arguments": {}} '])
def test_what_an_unfinished_call_is_looked_for_in_is_limited(begun: str) -> None:
    """A client may bring so many tokens of one that looking at all of them with each would take hours."""
    parser = HermesParser()
    parser.push("<tool_call>{" + begun)
    for _ in range(100):
        parser.push("word " * 100)
        assert len(parser._buffer) <= 4096
    parser.push("</tool_call>")
    assert parser._place == "content"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("logprob", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", ["logprob", "top_logprobs"])
def test_a_logprob_that_json_cannot_write_is_refused(path: str, logprob: float, place: str) -> None:
    entry: dict[str, Any] = {"token_id": 1, "logprob": -0.5, "top_logprobs": []}
    entry |= {"logprob": logprob} if place == "logprob" else {"top_logprobs": [{"token_id": 1, "logprob": logprob}]}
    assert f"logprob is {logprob}" in refusal(path, {"generate_chunk": part([1], logprobs={"content": [entry]})})


def test_minus_infinity_is_the_floor() -> None:
    entry = {"token_id": 1, "logprob": float("-inf"), "top_logprobs": []}
    (made,) = derendered(CHAT, [part([1], logprobs={"content": [entry]})])
    assert made["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_numbers_without_an_end_are_refused_by_their_field(path: str) -> None:
    """A number of as many digits as Python reads, and one more, is one that it does not write."""
    huge, one = 10**4300 - 1, part([1])
    assert "logprob_text_offset" in refusal(path, {"generate_chunk": one, "stream_state": {"logprob_text_offset": huge}})
    assert "prompt_tokens" in refusal(path, {"generate_chunk": one, "prompt_tokens": huge})
    usage = {"prompt_tokens": 1, "completion_tokens": huge}
    assert "completion_tokens" in refusal(path, {"generate_chunk": one | {"usage": usage}})
    assert "metrics" in refusal(path, {"generate_chunk": one | {"metrics": {"a": [float("nan")]}}})
