"""Frames and bodies of completions and chat, member by member (vLLM reference §2.4, §3.2 to §3.4)."""

import json
from typing import Any

import pytest
from tests.wire.vllm_env import JSON, TOKENIZER, env, frames, plan, stream, whole

from windtunnel.wire.family import ChoiceResult, Delta, TokenLogprob, Usage, WireError
from windtunnel.wire.vllm import chat, chat_batch, completions, generate, render

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OLD = env(version="0.32.0")
LOGPROBS = (TokenLogprob(400, " a", -0.5, ((400, " a", -0.5), (401, " b", -1.5))),)


def _last(delta: Delta) -> Delta:
    return delta._replace(finish_reason="length")


def test_completion_frames_of_the_recorded_release() -> None:
    generation = plan(completions, {"prompt": "a", "stream": True}, OLD)
    first, last, done = stream(completions, generation, Delta(0, " x", (1,)), _last(Delta(0, " y", (2,))))
    assert list(first) == ["id", "object", "created", "model", "choices"]
    assert list(first["choices"][0].items()) == [
        ("index", 0), ("text", " x"), ("logprobs", None), ("finish_reason", None), ("stop_reason", None),
        ("prompt_token_ids", None), ("token_ids", None),
    ]  # fmt: skip
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["system_fingerprint"] == "vllm-0.32.0-0123abcd"
    assert done == "[DONE]"


@pytest.mark.parametrize("family", [completions, chat])
@pytest.mark.parametrize("included", [False, True])
def test_a_beam_that_ends_names_the_end_token_and_does_not_count_it(family: Any, included: bool) -> None:
    """vLLM 0.33, `BeamSearchOnlineMixin`: unless the stop string is to be included."""
    eos = TOKENIZER.eos_token_id
    body = {"use_beam_search": True, "n": 2, "return_token_ids": True, "include_stop_str_in_output": included}
    generation = plan(family, body | ({"prompt": "a"} if family is completions else {"messages": HELLO}))
    ended, other = ChoiceResult(0, 0, " x", (1, eos), "stop", None), ChoiceResult(1, 0, " y z", (2, 3), "length", None)
    told = whole(family, generation, ended, other, usage=Usage(3, 4))
    assert [choice["stop_reason"] for choice in told["choices"]] == [eos, None]
    assert [choice["token_ids"] for choice in told["choices"]] == [[1, eos] if included else [1], [2, 3]]
    assert told["usage"]["completion_tokens"] == (4 if included else 3)


def test_completion_frames_of_the_described_release_have_more_members() -> None:
    generation = plan(completions, {"prompt": "a", "stream": True})
    first, last, _done = stream(completions, generation, Delta(0, " x", (1,)), _last(Delta(0, " y", (2,))))
    for value in (first, last):
        assert list(value["choices"][0])[-1] == "weight_versions"
        assert value["kv_transfer_params"] is None


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("family", [completions, chat])
def test_the_fast_path_writes_what_the_full_path_writes(family: Any, version: str) -> None:
    """With token ids asked for every frame takes the full path; without them only the ids differ."""
    body = {"stream": True} | ({"prompt": "a"} if family is completions else {"messages": HELLO})
    server = env(version=version)
    texts = [" plain", ' "quoted"\\', "\n\té🙂\x00", " \u2028"]
    deltas = [Delta(0, text, (at,)) for at, text in enumerate(texts)]
    fast = stream(family, plan(family, body, server), *deltas)
    full = stream(family, plan(family, body | {"return_token_ids": True}, server), *deltas)
    assert len(fast) == len(full)
    for quick, slow in zip(fast[:-1], full[:-1], strict=True):
        slow["id"] = quick["id"]
        for choice in slow["choices"]:
            choice.update({key: None for key in ("token_ids", "prompt_token_ids") if key in choice})
        slow.update({"prompt_token_ids": None} if "prompt_token_ids" in slow else {})
        assert json.dumps(quick) == json.dumps(slow)


def test_usage_chunks_drop_nulls_and_carry_the_fingerprint() -> None:
    server = env(enable_prompt_tokens_details=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usage = Usage(5, 2, cached_tokens=4, created_cache_tokens=1)
    made = stream(completions, plan(completions, {"prompt": "a"} | options, server), _last(Delta(0, "x", (1,))), usage=usage)
    assert "system_fingerprint" not in made[0]
    assert made[1]["usage"] == {
        "prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    talk = stream(chat, plan(chat, {"messages": HELLO} | options, server), _last(Delta(0, "x", (1,))), usage=usage)
    assert talk[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "created_cache_tokens": 1}
    assert list(talk[-2])[-2:] == ["usage", "system_fingerprint"]


def test_continuous_usage_counts_per_choice() -> None:
    body = {"prompt": ["a", " apple banana"], "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    generation = plan(completions, body | options)
    made = stream(completions, generation, Delta(0, "x", (1, 2)), Delta(1, "y", (3,)), Delta(0, "z", (4,)))
    assert [value["usage"]["completion_tokens"] for value in made[:3]] == [2, 1, 3]
    assert [value["usage"]["prompt_tokens"] for value in made[:3]] == [1, 2, 1]


def test_forced_usage_needs_no_request() -> None:
    generation = plan(chat, {"messages": HELLO, "stream": True}, env(enable_force_include_usage=True))
    made = stream(chat, generation, Delta(0, "x", (1,)))
    assert made[0]["usage"]["completion_tokens"] == 0
    assert list(made[0])[-3:] == ["usage", "prompt_token_ids", "prompt_text"]
    assert made[-2]["choices"] == []


def test_echo_puts_prompt_text_and_logprobs_in_front() -> None:
    generation = plan(completions, {"prompt": " apple", "echo": True, "logprobs": 1, "stream": True})
    first, _done = stream(completions, generation, Delta(0, " a", (400,), LOGPROBS))
    logprobs = first["choices"][0]["logprobs"]
    assert first["choices"][0]["text"] == " apple a"
    assert logprobs["tokens"] == [" apple", " a"] and logprobs["token_logprobs"][0] is None
    assert first["choices"][0]["prompt_token_ids"] == TOKENIZER.encode(" apple")
    assert logprobs["text_offset"] == [0, len(" apple")]


def test_offsets_count_on_from_an_echoed_prompt_in_a_stream_as_in_a_body() -> None:
    """As recorded from vLLM 0.32.0 (golden `completions__echo_stream_logprobs`)."""
    fields = {"prompt": " apple", "echo": True, "logprobs": 1}
    deltas = [Delta(0, text, (400,), LOGPROBS) for text in (" a", " bc", " d")]
    made = stream(completions, plan(completions, fields | {"stream": True}), *deltas)[:3]
    assert [value["choices"][0]["logprobs"]["text_offset"] for value in made] == [[0, 6], [8], [11]]
    made = stream(completions, plan(completions, {**fields, "echo": False, "stream": True}), *deltas)[:3]
    assert [value["choices"][0]["logprobs"]["text_offset"] for value in made] == [[0], [2], [5]]
    choice = ChoiceResult(0, 0, " a a", (400, 400), "length", None, LOGPROBS * 2)
    told = whole(completions, plan(completions, fields), choice)["choices"][0]["logprobs"]
    assert told["text_offset"] == [0, 6, 8]


def test_echo_without_output_is_the_prompt_alone() -> None:
    generation = plan(completions, {"prompt": " apple", "echo": True, "max_tokens": 0, "logprobs": 0})
    assert generation.sampling.max_tokens == 1
    choice = whole(completions, generation, ChoiceResult(0, 0, " a", (400,), "length", None, LOGPROBS))["choices"][0]
    assert choice["text"] == " apple" and choice["logprobs"]["tokens"] == [" apple"]
    assert choice["prompt_logprobs"] == [None]


def test_tokens_as_ids() -> None:
    generation = plan(completions, {"prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True})
    logprobs = whole(completions, generation, ChoiceResult(0, 0, " a", (400,), "length", None, LOGPROBS))["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["token_id:400"] and list(logprobs["top_logprobs"][0]) == ["token_id:400", "token_id:401"]


def test_completion_body_members() -> None:
    body = whole(completions, plan(completions, {"prompt": "a"}, OLD), ChoiceResult(0, 0, "x", (1,), "length", None))
    assert list(body) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "kv_transfer_params",
        "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert list(body["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids",
        "routed_experts",
    ]  # fmt: skip
    newer = whole(completions, plan(completions, {"prompt": "a"}), ChoiceResult(0, 0, "x", (1,), "length", None))
    assert "metrics" not in newer and list(newer["choices"][0])[-1] == "weight_versions"


def test_chat_order_roles_text_finish() -> None:
    generation = plan(chat, {"messages": HELLO, "n": 2, "temperature": 1, "stream": True}, OLD)
    made = stream(chat, generation, Delta(1, "x", (1,)), Delta(0, "", (2,)), Delta(1, "", (5,), None, "stop", 5))
    assert [value["choices"][0]["index"] for value in made[:-1]] == [0, 1, 1, 1]
    assert made[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert list(made[0])[-2:] == ["prompt_token_ids", "prompt_text"]
    finish = made[3]["choices"][0]
    assert finish["delta"] == {} and (finish["finish_reason"], finish["stop_reason"]) == ("stop", 5)
    assert list(finish) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]


def test_chat_echo_repeats_the_last_message() -> None:
    fields = {"messages": [*HELLO, {"role": "assistant", "content": "So"}], "echo": True, "stream": True}
    generation = plan(chat, fields | {"add_generation_prompt": False, "continue_final_message": True})
    made = stream(chat, generation, Delta(0, " it", (1,)))
    assert [value["choices"][0]["delta"].get("content") for value in made[:3]] == ["", "So", " it"]
    assert whole(chat, generation, ChoiceResult(0, 0, " it", (1,), "stop", None))["choices"][0]["message"]["content"] == "So it"


def test_chat_logprobs_and_token_ids() -> None:
    generation = plan(chat, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "stream": True})
    made = stream(chat, generation, Delta(0, " a", (400,), LOGPROBS))
    choice = made[1]["choices"][0]
    assert choice["token_ids"] == [400]
    assert choice["logprobs"]["content"][0] == {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "top_logprobs": [{"token": " a", "logprob": -0.5, "bytes": [32, 97]}],
    }
    assert made[0]["prompt_token_ids"] == list(generation.prompts[0].token_ids)


def test_logprobs_of_held_back_chat_text_come_with_the_next_frame() -> None:
    generation = plan(chat, {"messages": HELLO, "stream": True, "logprobs": True, "stop": ["banana"]})
    entries = [LOGPROBS[0]._replace(token=name) for name in ("one", "two", "three", "four")]
    deltas = [Delta(0, text, (at,), (entries[at],)) for at, text in enumerate(("", " a", "", ""))]
    _role, *told, _done = stream(chat, generation, *deltas[:3], _last(deltas[3]))
    names = [[entry["token"] for entry in frame["choices"][0]["logprobs"]["content"]] for frame in told]
    assert names == [["one", "two"], ["three", "four"]]


def test_held_back_chat_text_is_no_frame_unless_token_ids_are_wanted() -> None:
    plain = stream(chat, plan(chat, {"messages": HELLO, "stream": True}), Delta(0, "", (1,)), Delta(0, "", (2,)))
    assert len(plain) == 2
    wanted = stream(chat, plan(chat, {"messages": HELLO, "stream": True, "return_token_ids": True}), Delta(0, "", (1,)))
    assert wanted[1]["choices"][0]["delta"] == {} and wanted[1]["choices"][0]["token_ids"] == [1]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'


def _tool_stream(text: str, size: int, **fields: Any) -> list[Any]:
    generation = plan(chat, {"messages": HELLO, "tools": [TOOL], "stream": True} | fields)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [Delta(0, part, (at,)) for at, part in enumerate(parts)]
    return stream(chat, generation, *deltas, Delta(0, "", (5,), None, "stop", 5))


@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_tool_calls_stream_name_first_then_arguments(size: int) -> None:
    made = _tool_stream(f"Let me see.\n{CALL}\n{CALL}", size)
    pieces = [piece for value in made[1:-1] for piece in value["choices"][0]["delta"].get("tool_calls", ())]
    names = [piece for piece in pieces if "name" in piece["function"]]
    assert [list(piece) for piece in names] == [["id", "type", "index", "function"]] * 2
    assert [piece["index"] for piece in names] == [0, 1]
    for index in (0, 1):
        said = "".join(piece["function"].get("arguments", "") for piece in pieces if piece["index"] == index)
        assert said == '{"a": "}"}'
    content = "".join(value["choices"][0]["delta"].get("content") or "" for value in made[1:-1])
    assert content == "Let me see.\n"
    assert made[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "finish", "content"),
    [
        ("auto", "tool_calls", None),
        ("required", "tool_calls", ""),
        ({"type": "function", "function": {"name": "f"}}, "stop", ""),
    ],
    ids=str,
)
def test_tool_calls_of_a_body(choice: Any, finish: str, content: str | None) -> None:
    generation = plan(chat, {"messages": HELLO, "tools": [TOOL], "tool_choice": choice})
    told = whole(chat, generation, ChoiceResult(0, 0, CALL, (1,), "stop", 5))["choices"][0]
    assert (told["finish_reason"], told["message"]["content"]) == (finish, content)
    assert told["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "}"}'}
    assert list(told["message"])[-2:] == ["tool_calls", "reasoning"]


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "f"', "no call", '<tool_call>{"a": 1}</tool_call>'])
def test_text_that_is_no_call_stays_content(text: str) -> None:
    generation = plan(chat, {"messages": HELLO, "tools": [TOOL]})
    told = whole(chat, generation, ChoiceResult(0, 0, text, (1,), "length", None))["choices"][0]
    assert told["message"]["content"] == text and "tool_calls" not in told["message"]
    assert told["finish_reason"] == "length"


def test_without_parallel_calls_only_the_first_is_told() -> None:
    made = _tool_stream(f"{CALL}\n{CALL}", 4, parallel_tool_calls=False)
    indexes = {piece["index"] for value in made[1:-1] for piece in value["choices"][0]["delta"].get("tool_calls", ())}
    assert indexes == {0}


REASONING = env(reasoning_parser="qwen3")


@pytest.mark.parametrize("size", [1, 2, 9, 100])
def test_reasoning_is_split_from_content(size: int) -> None:
    text = "<think>\nwhy\n</think>\n\nso"
    generation = plan(chat, {"messages": HELLO, "stream": True}, REASONING)
    parts = [Delta(0, text[at : at + size], (at,)) for at in range(0, len(text), size)]
    made = stream(chat, generation, *parts)
    deltas = [value["choices"][0]["delta"] for value in made[1:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "\nwhy\n"
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nso"
    message = whole(chat, generation, ChoiceResult(0, 0, text, (1,), "stop", None))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("\nwhy\n", "\n\nso")


def test_text_without_tags_is_all_reasoning_and_counted() -> None:
    generation = plan(chat, {"messages": HELLO}, REASONING)
    body = whole(chat, generation, ChoiceResult(0, 0, "hm", (400, 401, TOKENIZER.eos_token_id), "stop", None))
    assert body["choices"][0]["message"]["content"] is None
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_can_be_left_out_or_switched_off() -> None:
    hidden = plan(chat, {"messages": HELLO, "include_reasoning": False, "stream": True}, REASONING)
    made = stream(chat, hidden, Delta(0, "<think>x</think>", (1,)), Delta(0, "y", (2,)))
    assert [value["choices"][0]["delta"] for value in made[1:-1]] == [{"content": "y", "reasoning": None}]
    off = plan(chat, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}, REASONING)
    assert whole(chat, off, ChoiceResult(0, 0, "y", (2,), "stop", None))["choices"][0]["message"]["content"] == "y"


@pytest.mark.parametrize(("family", "spaced"), [(completions, True), (chat, False)])
def test_errors_in_a_stream_end_it(family: Any, spaced: bool) -> None:
    body = {"prompt": "a"} if family is completions else {"messages": HELLO}
    encoder = family.encoder(plan(family, body | {"stream": True}))
    data = encoder.error(WireError("gone", 500, "InternalServerError"))
    assert (b'{"error": {' in data) is spaced
    value, done = frames(data)
    assert value["error"] == {"message": "gone", "type": "InternalServerError", "param": None, "code": 500}
    assert done == "[DONE]"


def test_batch_body_has_one_choice_per_conversation() -> None:
    generation = plan(chat_batch, {"messages": [HELLO, HELLO]}, env(enable_prompt_tokens_details=True))
    body = whole(chat_batch, generation, *(ChoiceResult(at, at, "x", (1,), "stop", None) for at in (0, 1)))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens_details"] is None


def test_per_request_metrics_when_switched_on() -> None:
    server = env(enable_per_request_metrics=True)
    usage = Usage(1, 1, metrics={"time_to_first_token_ms": 1.5, "mean_itl_ms": None})
    body = whole(
        completions, plan(completions, {"prompt": "a"}, server), ChoiceResult(0, 0, "x", (1,), "stop", None), usage=usage
    )
    assert body["metrics"] == {"time_to_first_token_ms": 1.5, "mean_itl_ms": None}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    made = stream(completions, plan(completions, {"prompt": "a"} | options, server), Delta(0, "x", (1,)), usage=usage)
    assert made[-2]["metrics"] == {"time_to_first_token_ms": 1.5}


def test_tokens_in_tokens_out() -> None:
    body = {"token_ids": [400, 401], "sampling_params": {"max_tokens": 3, "logprobs": 1}, "stream": True}
    generation = plan(generate, body, env(enable_scale_out=True))
    first, last, done = stream(generate, generation, Delta(0, " a", (400,), LOGPROBS), _last(Delta(0, " b", (401,), LOGPROBS)))
    assert first["request_id"].startswith("generate-tokens-") and first["choices"][0]["weight_versions"] is None
    assert last["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 2}]
    assert first["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0] == {"token_id": 400, "logprob": -0.5, "rank": 1}
    assert done == "[DONE]"
    told = whole(generate, generation, ChoiceResult(0, 0, " a", (400,), "length", None))
    assert told["choices"][0]["token_ids"] == [400] and told["output_mode"] == "tokens"


def test_scale_out_is_forbidden_until_it_is_switched_on() -> None:
    for call in (render.chat_render, render.completions_render, generate.plan):
        with pytest.raises(WireError, match="--enable-scale-out") as caught:
            call(b"{}", JSON, env())
        assert (caught.value.status, caught.value.kind) == (403, "PermissionDeniedError")


def test_render_answers_with_what_generate_takes() -> None:
    server = env(enable_scale_out=True)
    rendered = json.loads(render.completions_render(b'{"prompt": [" apple", " banana"], "max_tokens": 4}', JSON, server))
    assert [one["token_ids"] for one in rendered] == [TOKENIZER.encode(" apple"), TOKENIZER.encode(" banana")]
    body = {"token_ids": rendered[0]["token_ids"], "sampling_params": rendered[0]["sampling_params"]}
    assert plan(generate, body, server).sampling.max_tokens == 4
