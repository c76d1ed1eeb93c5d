"""SGLang's families as pure functions: bodies, frames and errors (SGLang reference §7.2 to §7.4)."""

import json
from types import ModuleType
from typing import Any

import pytest

from windtunnel.core.request import Lora
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.env import counting_ids
from windtunnel.wire.family import Delta, Generation, Usage, WireError
from windtunnel.wire.output import ChoiceState
from windtunnel.wire.sglang import chat, completions, messages, native
from windtunnel.wire.sglang.env import SglangEnv

JSON = {"content-type": "application/json"}
HELLO = {"messages": [{"role": "user", "content": "hi [wt:1]"}]}
TOKENIZER = BuiltinTokenizer()


def env(**values: Any) -> SglangEnv:
    fixed = {"max_model_len": 4096, "new_id": counting_ids(), "now_s": lambda: 1_700_000_000, "clock_s": lambda: 5.0}
    return SglangEnv(served_models=("m",), tokenizer=TOKENIZER, **{**fixed, **values})


def plan(family: ModuleType, body: dict[str, Any], given: SglangEnv | None = None, **headers: str) -> Generation:
    told: Generation = family.plan(json.dumps(body).encode(), JSON | headers, given or env())
    return told


def refused(family: ModuleType, body: Any, given: SglangEnv | None = None) -> tuple[int, Any]:
    with pytest.raises(WireError) as caught:
        family.plan(body if isinstance(body, bytes) else json.dumps(body).encode(), JSON, given or env())
    return caught.value.status, json.loads(family.error_body(caught.value))


def events(frames: bytes) -> list[Any]:
    lines = [line[6:] for line in frames.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def stream(family: ModuleType, generation: Generation, words: list[str], finish: str = "length", stop: Any = None) -> list[Any]:
    """The events of a stream of one choice, a word at a time."""
    encoder = family.encoder(generation)
    usage = Usage(len(generation.prompts[0].token_ids), 0)
    usage.count_cached(4)
    frames = []
    for at, word in enumerate(words):
        last = at == len(words) - 1
        usage.completion_tokens += 1
        frames.append(encoder.delta(Delta(0, word, (at,), None, finish if last else None, stop if last else None), usage))
    return events(b"".join(frames) + encoder.close(usage))


def whole(family: ModuleType, generation: Generation, reason: str | None = "stop", stop: Any = 2) -> Any:
    choice = ChoiceState(0, 0, generation.sampling, TOKENIZER)
    tokens = tuple(TOKENIZER.encode(" orange holly", add_special_tokens=False))
    choice.push(tokens)
    choice.push((2,), reason, stop)
    usage = Usage(len(generation.prompts[0].token_ids), len(tokens) + 1)
    return json.loads(family.body(generation, [choice.result()], usage))


# The native endpoint


def test_native_events_are_cumulative_and_only_the_last_names_a_finish() -> None:
    told = stream(native, plan(native, {"text": "hi", "rid": "a", "stream": True}), [" one", " two", " three"])
    assert [event["text"] for event in told[:-1]] == [" one", " one two", " one two three"]
    assert [event["output_ids"] for event in told[:-1]] == [[0], [0, 1], [0, 1, 2]]
    assert [event["meta_info"]["finish_reason"] for event in told[:-1]] == [None, None, {"type": "length", "length": 3}]
    assert [event["meta_info"]["completion_tokens"] for event in told[:-1]] == [1, 2, 3]
    assert {event["meta_info"]["id"] for event in told[:-1]} == {"a"}
    assert told[0]["meta_info"]["cached_tokens"] == 4
    assert "index" not in told[0]
    assert told[-1] == "[DONE]"


def test_native_events_say_what_is_new_with_incremental_output() -> None:
    told = stream(native, plan(native, {"text": "hi"}, env(incremental_output=True)), [" one", " two"])
    assert [event["text"] for event in told[:-1]] == [" one", " two"]
    assert [event["meta_info"]["completion_tokens"] for event in told[:-1]] == [1, 2]


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [
        ("stop", 2, {"type": "stop", "matched": 2}),
        ("stop", "END", {"type": "stop", "matched": "END"}),
        ("length", None, {"type": "length", "length": 1}),
        ("abort", "Aborted", {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
    ],
)
def test_native_finish_objects(reason: str, stop: Any, told: dict[str, Any]) -> None:
    assert stream(native, plan(native, {"text": "hi"}), ["x"], reason, stop)[0]["meta_info"]["finish_reason"] == told


def test_a_native_answer_without_a_stream() -> None:
    told = whole(native, plan(native, {"text": "hi", "rid": "a", "return_logprob": True, "top_logprobs_num": 2}))
    assert told["text"] == " orange holly"
    meta = told["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert (meta["weight_version"], meta["completion_tokens"]) == ("default", 3)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == told["output_ids"]
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["input_token_logprobs"] == []


def test_input_logprobs_begin_where_asked() -> None:
    told = whole(native, plan(native, {"text": "a b c", "return_logprob": True, "logprob_start_len": 0}))
    said = told["meta_info"]["input_token_logprobs"]
    assert said[0][0] is None
    assert [entry[1] for entry in said] == list(TOKENIZER.encode("a b c"))


def test_a_batch_has_ids_of_its_own_and_n_makes_a_list() -> None:
    batch = plan(native, {"text": ["a", "b"], "rid": "x"})
    assert batch.engine_ids == ("x_0", "x_1")
    assert plan(native, {"text": ["a", "b"], "rid": ["p", "q"]}).engine_ids == ("p", "q")
    assert plan(native, {"input_ids": [[1, 2], [3]]}).prompts[1].token_ids == (3,)
    several = plan(native, {"text": "a", "rid": "x", "sampling_params": {"n": 2}})
    assert (several.spec.rids, several.spec.batch) == (("x_0", "x_1"), True)


def test_what_routers_add_to_a_native_request_is_accepted() -> None:
    """As sglang-router 0.3.2 sends it (clients reference §3)."""
    body = {"text": "hi", "model": None, "sampling_params": {"max_new_tokens": 3}, "return_text_in_logprobs": False}
    body |= {"stream": False, "log_metrics": True, "return_hidden_states": False, "background": False, "no_logs": False}
    assert plan(native, body | {"return_bytes": False, "return_entropy": False}).sampling.max_tokens == 3
    assert plan(native, {"text": "hi"}).sampling.max_tokens == 128


def test_bootstrap_fields_reach_each_prompt() -> None:
    pair = {"bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": 7}
    assert plan(native, {"text": "a"} | pair).bootstrap == (("h", None, 7),)
    assert plan(native, {"text": ["a", "b"]} | pair).bootstrap == (("h", None, 7), ("h", None, 8))
    lists = {"bootstrap_host": ["h", "i"], "bootstrap_port": [1, 2], "bootstrap_room": [8, 2**63 - 1]}
    assert plan(completions, {"prompt": ["a", "b"]} | lists).bootstrap == (("h", 1, 8), ("i", 2, 2**63 - 1))
    status, told = refused(completions, {"prompt": ["a", "b"], **lists, "bootstrap_room": [1]})
    assert (status, "bootstrap_room" in told["message"]) == (400, True)


def test_each_choice_has_a_room_of_its_own() -> None:
    """For `n` = 2 sglang-router 0.3.2 and smg 1.13.0 send lists of two with one conversation."""
    pair = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    rooms = [room for _, _, room in plan(completions, {"prompt": ["a", "b"], "n": 2} | pair).bootstrap]
    assert rooms == [7, 8, 9, 10]
    lists = {"bootstrap_host": ["h", "h"], "bootstrap_port": [1, 1], "bootstrap_room": [70, 50]}
    talk = {"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 2}
    assert plan(chat, talk | lists).bootstrap == (("h", 1, 70), ("h", 1, 50))
    by_prompt = plan(completions, {"prompt": ["a", "b"], "n": 2} | lists).bootstrap
    assert [room for _, _, room in by_prompt] == [70, 71, 50, 51]
    native_n = {"text": "a", "sampling_params": {"n": 2}} | lists
    assert [room for _, _, room in plan(native, native_n).bootstrap] == [70, 50]
    assert refused(chat, talk | lists | {"bootstrap_room": [1, 2, 3]})[0] == 400


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "only one"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "context length"),
        ({"input_ids": [999_999]}, "999999"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "lora_path": "x"}, "'x' is not loaded"),
        ({"text": "a", "routed_dp_rank": 1}, "routed_dp_rank"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "Only one"),
    ],
)
def test_bad_values_of_the_native_endpoint(fields: dict[str, Any], word: str) -> None:
    status, told = refused(native, fields)
    assert status == 400
    assert list(told) == ["error"]
    assert word in told["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"text": 5}'])
def test_bodies_that_do_not_validate_are_400_and_flat(body: bytes) -> None:
    status, told = refused(native, body)
    assert (status, told["object"], told["code"], told["param"]) == (400, "error", 400, None)


def test_an_abort_with_a_status_is_a_last_native_event_and_a_bad_value_an_error_object() -> None:
    encoder = native.encoder(plan(native, {"text": "a", "rid": "r"}))
    last, done = events(encoder.error(WireError("gone", 500, "InternalServerError")))
    assert last["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "gone",
        "status_code": 500,
        "err_type": "InternalServerError",
    }
    assert done == "[DONE]"
    encoder = native.encoder(plan(native, {"text": "a"}))
    told = events(encoder.error(WireError("too long")))[0]
    assert told == {"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}


# The OpenAI endpoints


def test_a_chat_stream_has_a_role_event_deltas_a_finish_event_and_usage() -> None:
    asked = HELLO | {"model": "x", "rid": "r", "stream": True, "stream_options": {"include_usage": True}}
    told = stream(chat, plan(chat, asked), [" one", " two"], "stop", 2)
    assert {event["id"] for event in told[:-1]} == {"r"}
    assert {event["model"] for event in told[:-1]} == {"x"}
    choices = [event["choices"][0] for event in told[:4]]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert [choice["delta"] for choice in choices[1:]] == [
        {"content": " one", "reasoning_content": None},
        {"content": " two", "reasoning_content": None},
        {},
    ]
    assert [(choice["finish_reason"], choice["matched_stop"]) for choice in choices] == [(None, None)] * 3 + [("stop", 2)]
    assert all(choice["logprobs"] is None for choice in choices)
    assert told[4]["choices"] == []
    assert told[4]["usage"]["completion_tokens"] == 2
    assert told[4]["usage"]["prompt_tokens_details"] is None
    assert told[5] == "[DONE]"


def test_continuous_usage_is_on_every_event_and_cached_tokens_only_with_the_cache_report() -> None:
    asked = HELLO | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    told = stream(chat, plan(chat, asked, env(enable_cache_report=True)), [" one", " two"])
    assert [event["usage"]["completion_tokens"] for event in told[:-1]] == [1, 1, 2, 2, 2]
    assert {event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in told[:-1]} == {4}


@pytest.mark.parametrize("family", [completions, chat])
def test_the_plain_way_writes_the_same_frames(family: ModuleType) -> None:
    generation = plan(family, {"prompt": "hi"} if family is completions else HELLO)
    usage = Usage(1, 0)
    slow, fast = family.encoder(generation), family.encoder(generation)
    assert fast.plain(0) is None
    assert slow.delta(Delta(0, " a", (1,)), usage) == fast.delta(Delta(0, " a", (1,)), usage)
    head, tail = fast.plain(0)
    assert head + b'" b"' + tail == slow.delta(Delta(0, " b", (2,)), usage)


def test_a_completion_finishes_on_its_last_text_event() -> None:
    told = stream(completions, plan(completions, {"prompt": "hi", "echo": True}), [" one", " two"], "stop", "END")
    assert [event["choices"][0]["text"] for event in told[:-1]] == ["hi one", " two"]
    last = told[-2]["choices"][0]
    assert (last["finish_reason"], last["matched_stop"]) == ("stop", "END")
    assert len(told) == 3


@pytest.mark.parametrize("family", [completions, chat])
def test_an_error_inside_an_openai_stream(family: ModuleType) -> None:
    body = ({"prompt": "hi"} if family is completions else HELLO) | {"stream_options": {"include_usage": True}}
    told = events(family.encoder(plan(family, body)).error(WireError("boom", 500, "InternalServerError")))
    assert told[0]["error"]["type"] == "INTERNAL_SERVER_ERROR"
    assert told[1]["choices"] == []
    assert told[2] == "[DONE]"


def test_errors_before_the_head_are_flat() -> None:
    status, told = refused(chat, HELLO | {"temperature": -1})
    assert status == 400
    assert told == {"object": "error", "message": told["message"], "type": "BadRequestError", "param": None, "code": 400}


def test_max_completion_tokens_and_the_fields_a_router_adds() -> None:
    """As sglang-router 0.3.2 re-serialises a chat request (clients reference §3)."""
    added = {"max_completion_tokens": 5, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False}
    added |= {"skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False}
    generation = plan(chat, HELLO | {"model": "fake", "logprobs": False, "stream": False} | added)
    assert (generation.sampling.max_tokens, generation.model) == (5, "fake")
    assert plan(chat, HELLO).sampling.max_tokens == 4096 - len(plan(chat, HELLO).prompts[0].token_ids)


def test_an_adapter_is_named_by_path_or_behind_the_model() -> None:
    loaded = env(loras={"ad": Lora("ad", "/ad", 1)})
    assert plan(chat, HELLO | {"model": "m:ad"}, loaded).lora == Lora("ad", "/ad", 1)
    assert plan(native, {"text": "a", "lora_path": "ad"}, loaded).lora == Lora("ad", "/ad", 1)
    assert plan(chat, HELLO | {"model": "anything"}, loaded).lora is None


def test_headers_and_namespaces() -> None:
    two = env(data_parallel_size=2)
    asked = HELLO | {"extra_key": "k", "cache_salt": "s", "priority": 3}
    generation = plan(chat, asked, two, **{"x-data-parallel-rank": "1", "x-smg-routing-key": "key"})
    found = (generation.data_parallel_rank, generation.routing_key, generation.extra_key, generation.cache_salt)
    assert found == (1, "key", "k", "s")
    assert generation.priority == 3


def test_reasoning_and_tool_calls() -> None:
    parsed = env(reasoning_parser="qwen3", tool_call_parser="hermes")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    told = stream(chat, plan(chat, HELLO | {"tools": [tool]}, parsed), ["why", "</think>", call], "stop", 2)
    deltas = [event["choices"][0]["delta"] for event in told[:-1]]
    assert deltas[1] == {"content": None, "reasoning_content": "why"}
    name = next(delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert (name["function"]["name"], name["type"]) == ("f", "function")
    assert name["id"].startswith("call_")
    assert told[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_forced_tool_needs_no_parser() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": "f"}}
    assert '"name": "f"' in str(plan(chat, HELLO | {"tools": [tool], "tool_choice": named}).answer_text)


def test_a_message_answers_in_anthropics_form_and_scrubs_5xx() -> None:
    generation = plan(messages, HELLO | {"model": "x", "max_tokens": 5, "rid": "r"})
    assert generation.engine_ids == ("r",)
    told = whole(messages, generation)
    assert (told["model"], told["stop_reason"], told["content"][0]["text"]) == ("x", "end_turn", " orange holly")
    status, error = refused(messages, {"model": "x", "messages": []})
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    scrubbed = json.loads(messages.error_body(WireError("secret", 500)))
    assert scrubbed["error"] == {"type": "api_error", "message": "Internal server error"}


def test_tools_without_a_parser_flag_are_taken_by_messages() -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    asked = HELLO | {"model": "x", "max_tokens": 500, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    assert '"name": "f"' in str(plan(messages, asked).answer_text)
    assert plan(messages, asked | {"tool_choice": {"type": "auto"}}).answer_text is None


def deltas_of(generation: Generation, *parts: tuple[int, ...], finish: str | None = None) -> list[Delta]:
    choice = ChoiceState(0, 0, generation.sampling, TOKENIZER, keep=False)
    made = [choice.push(part, finish if at == len(parts) - 1 else None) for at, part in enumerate(parts)]
    return [delta for delta in made if delta is not None]


def test_logprobs_of_held_back_chat_text_come_with_a_later_event() -> None:
    generation = plan(chat, HELLO | {"stream": True, "logprobs": True, "stop": [" holly orange"]})
    words = [tuple(TOKENIZER.encode(word, add_special_tokens=False)) for word in (" a", " holly", " orange", " x")]
    encoder = chat.encoder(generation)
    made = deltas_of(generation, *words[:3])
    assert made[-1].finish_reason == "stop"
    told = events(b"".join(encoder.delta(delta, Usage(4, 3)) for delta in made) + encoder.close(Usage(4, 3)))
    lists = [one["choices"][0]["logprobs"] for one in told[:-1] if one["choices"]]
    tokens = [entry["token"] for logprobs in lists if logprobs for entry in logprobs["content"]]
    assert tokens == [" a", " holly", " orange"]


def test_a_streamed_echo_has_the_logprobs_of_the_prompt_in_front() -> None:
    body = {"prompt": " apple banana", "echo": True, "logprobs": 1, "stream": True}
    generation = plan(completions, body)
    made = deltas_of(generation, *((token,) for token in TOKENIZER.encode(" holly orange", add_special_tokens=False)))
    encoder = completions.encoder(generation)
    told = events(b"".join(encoder.delta(delta, Usage(2, 2)) for delta in made))
    first, second = (one["choices"][0] for one in told)
    assert first["text"] == " apple banana holly"
    assert first["logprobs"]["tokens"] == [" apple", " banana", " holly"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["text_offset"] == [-1, -1, -1]
    assert [None if top is None else len(top) for top in first["logprobs"]["top_logprobs"]] == [None, 1, 1]
    assert second["logprobs"]["tokens"] == [" orange"] and second["logprobs"]["text_offset"] == [-1]


def test_no_alternatives_are_an_empty_list_and_leave_the_echoed_prompt_without_logprobs() -> None:
    """SGLang 0.5.23, `to_openai_style_logprobs` and `if echo and request.logprobs`."""
    generation = plan(completions, {"prompt": " apple banana", "echo": True, "logprobs": 0})
    choice = ChoiceState(0, 0, generation.sampling, TOKENIZER)
    choice.push(tuple(TOKENIZER.encode(" holly", add_special_tokens=False)), "length")
    told = json.loads(completions.body(generation, [choice.result()], Usage(2, 1)))["choices"][0]
    assert told["text"] == " apple banana holly"
    assert told["logprobs"] | {"token_logprobs": None} == {
        "text_offset": [-1],
        "token_logprobs": None,
        "tokens": [" holly"],
        "top_logprobs": [],
    }


@pytest.mark.parametrize(
    ("pattern", "text", "matched"),
    [
        ("ora(n|m)ge", " a holly orange", "ora(n|m)ge"),
        (["x+", "y o+"], " a holly orange", "y o+"),
        ("y o", " a holl", "y o"),
        ("^nothing$", " a holly orange x", None),
    ],
)
def test_a_stop_regex_ends_the_answer_and_stays_in_its_text(pattern: Any, text: str, matched: str | None) -> None:
    """SGLang looks for the *pattern* in the text, to trim it: only a plain text is found (0.5.23, `trim_matched_stop`)."""
    generation = plan(native, {"text": "hi", "stream": True, "sampling_params": {"stop_regex": pattern, "max_new_tokens": 4}})
    tokens = TOKENIZER.encode(" a holly orange x", add_special_tokens=False)
    choice = ChoiceState(0, 0, generation.sampling, TOKENIZER, keep=False)
    said = ""
    for token in tokens:
        delta = choice.push((token,))
        assert delta is not None
        said += delta.text
        if delta.finish_reason:
            break
    assert (said, choice.stopped_by) == (text, matched)
    assert native.finish_object(choice.finish_reason, choice.stop_reason, 3) == (
        {"type": "stop", "matched": matched} if matched else None
    )


def test_a_stop_string_counts_before_the_least_number_of_tokens() -> None:
    """SGLang 0.5.23 keeps only the end-of-text token and `stop_token_ids` back until `min_new_tokens`."""
    for stop in ({"stop": [" holly"]}, {"stop_regex": "hol+y"}):
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 9, **stop}}
        choice = ChoiceState(0, 0, plan(native, body).sampling, TOKENIZER, keep=False)
        for token in TOKENIZER.encode(" a holly", add_special_tokens=False):
            choice.push((token,))
        assert choice.stopped_by


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "invalid regex"),
        ("(?=a)b", "not supported"),
        (["a"] * 33, "at most 32 stop_regex patterns are allowed, got 33"),
        ("é" * 129, "stop_regex is 258 bytes, over the 256-byte limit"),
    ],
)
def test_a_stop_regex_that_cannot_be_is_a_400(pattern: Any, word: str) -> None:
    status, told = refused(native, {"text": "hi", "sampling_params": {"stop_regex": pattern}})
    assert status == 400 and word in json.dumps(told)
    status, told = refused(chat, HELLO | {"stop_regex": pattern})
    assert status == 400 and word in json.dumps(told)
