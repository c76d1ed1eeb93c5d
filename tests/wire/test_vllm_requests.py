"""What is refused, with which status, type and parameter, and at which of the two stages (vLLM reference §2.2 to §2.8)."""

import json
from typing import Any

import pytest
from tests.wire.vllm_env import JSON, env, plan

from windtunnel.core.request import Lora, Repetition
from windtunnel.wire.family import Usage, WireError
from windtunnel.wire.vllm import chat, chat_batch, completions, decisions, invocations, messages_in, models, scoring, tokenize

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

COMPLETION_REFUSALS = [
    ({"prompt": None}, 400, "BadRequestError", "prompt"),
    ({"prompt": ""}, 400, "BadRequestError", "prompt"),
    ({"prompt": []}, 400, "BadRequestError", None),
    ({"prompt": {"a": 1}}, 400, "Bad Request", "body.prompt"),
    ({"model": "gpt-4"}, 404, "NotFoundError", "model"),
    ({"n": 0}, 400, "BadRequestError", None),
    ({"n": 2, "temperature": 0}, 400, "BadRequestError", None),
    ({"n": 20000}, 400, "BadRequestError", None),
    ({"n": "two"}, 400, "Bad Request", "body.n"),
    ({"temperature": -0.5}, 400, "BadRequestError", "temperature"),
    ({"temperature": 2.5}, 400, "BadRequestError", "temperature"),
    ({"temperature": "hot"}, 400, "Bad Request", "body.temperature"),
    ({"top_p": 0}, 400, "BadRequestError", "top_p"),
    ({"top_k": -2}, 400, "BadRequestError", None),
    ({"min_p": 2}, 400, "BadRequestError", None),
    ({"repetition_penalty": 0}, 400, "BadRequestError", None),
    ({"presence_penalty": 3}, 400, "BadRequestError", None),
    ({"frequency_penalty": -3}, 400, "BadRequestError", None),
    ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    ({"max_tokens": 257}, 400, "BadRequestError", "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 4}, 400, "BadRequestError", None),
    ({"stop": [""]}, 400, "BadRequestError", None),
    ({"stop": list("abcde")}, 400, "Bad Request", "body.stop"),
    ({"seed": 2**63}, 400, "Bad Request", "body.seed"),
    ({"suffix": "x"}, 400, "BadRequestError", "suffix"),
    ({"prompt_embeds": "AAAA"}, 400, "BadRequestError", "prompt_embeds"),
    ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "BadRequestError", "prompt_logprobs"),
    ({"prompt_logprobs": -5}, 400, "BadRequestError", "prompt_logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "BadRequestError", "logit_bias"),
    ({"truncate_prompt_tokens": -2}, 400, "Bad Request", "body.truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 500}, 400, "BadRequestError", "truncate_prompt_tokens"),
    ({"prompt": list(range(100, 400))}, 400, "BadRequestError", "input_tokens"),
    ({"prompt": "hello " * 300}, 400, "BadRequestError", "input_tokens"),
    ({"prompt": "x" * 100_000}, 400, "BadRequestError", "input_text"),
    ({"prompt": "\ud800"}, 400, "BadRequestError", None),
    ({"response_format": {"type": "json_schema"}}, 400, "BadRequestError", "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "BadRequestError", "structured_outputs"),
    ({"cache_salt": ""}, 400, "BadRequestError", "cache_salt"),
    ({"cache_salt": "a/b"}, 400, "BadRequestError", "cache_salt"),
    ({"cache_salt": "s" * 129}, 400, "BadRequestError", "cache_salt"),
    ({"stream_interval": 0}, 400, "Bad Request", "body.stream_interval"),
]


@pytest.mark.parametrize(("fields", "status", "kind", "param"), COMPLETION_REFUSALS, ids=lambda value: str(value)[:40])
def test_completions_refuses_before_the_head(fields: dict[str, Any], status: int, kind: str, param: str | None) -> None:
    with pytest.raises(WireError) as caught:
        plan(completions, {"prompt": "hello"} | fields)
    assert (caught.value.status, caught.value.kind, caught.value.param) == (status, kind, param)


CHAT_REFUSALS = [
    ({"messages": []}, 400, "BadRequestError", None),
    ({"messages": None}, 400, "BadRequestError", None),
    ({"messages": "hi"}, 400, "Bad Request", "body.messages"),
    ({"tools": []}, 400, "BadRequestError", "tools"),
    ({"tool_choice": "auto"}, 400, "BadRequestError", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, 400, "BadRequestError", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "BadRequestError", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "BadRequestError", "tool_choice"),
    ({"tools": [{"type": "function"}]}, 400, "Bad Request", "body.tools.0.function"),
    ({"top_logprobs": 2}, 400, "BadRequestError", "top_logprobs"),
    ({"top_logprobs": -3, "logprobs": True}, 400, "BadRequestError", "top_logprobs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, 400, "BadRequestError", None),
    ({"chat_template": "x"}, 400, "BadRequestError", None),
    ({"mm_processor_kwargs": {"a": 1}}, 400, "BadRequestError", None),
    ({"reasoning_effort": "huge"}, 400, "Bad Request", "body.reasoning_effort"),
    ({"max_completion_tokens": 300}, 400, "BadRequestError", "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "zzz"}]}]}, 400, "BadRequestError", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        400,
        "BadRequestError",
        None,
    ),
]


@pytest.mark.parametrize(("fields", "status", "kind", "param"), CHAT_REFUSALS, ids=lambda value: str(value)[:40])
def test_chat_refuses_before_the_head(fields: dict[str, Any], status: int, kind: str, param: str | None) -> None:
    with pytest.raises(WireError) as caught:
        plan(chat, {"messages": HELLO} | fields)
    assert (caught.value.status, caught.value.kind, caught.value.param) == (status, kind, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt": [99999]}, None),
        ({"prompt": [[]]}, None),
        ({"structured_outputs": {"json": {"type": "nope"}}}, None),
        ({"structured_outputs": {"choice": []}}, None),
        ({"thinking_token_budget": 4}, None),
    ],
    ids=str,
)
def test_faults_of_the_engine_input_stage_are_late(fields: dict[str, Any], param: str | None) -> None:
    generation = plan(completions, {"prompt": "hello", "stream": True} | fields)
    assert generation.late_error is not None
    assert (generation.late_error.status, generation.late_error.param) == (400, param)


def test_a_session_is_the_bodys_then_the_headers_then_the_extra_arguments() -> None:
    """vLLM 0.33, `GenerateBaseServing._get_session_id`."""
    named = {"prompt": "a", "session_id": "body", "vllm_xargs": {"session_id": "extra"}}
    assert plan(completions, named, x_session_id="header").session_id == "body"
    assert plan(completions, named | {"session_id": None}, x_session_id="header").session_id == "header"
    assert plan(completions, named | {"session_id": None}).session_id == "extra"
    assert plan(completions, {"prompt": "a", "vllm_xargs": {"session_id": 7}}).session_id is None


def test_rank_and_priority_come_from_headers() -> None:
    generation = plan(
        completions, {"prompt": "a", "priority": 3}, x_vllm_priority="7", x_data_parallel_rank="1", x_request_id="r"
    )
    assert (generation.priority, generation.data_parallel_rank, generation.response_id) == (7, 1, "cmpl-r")
    assert generation.late_error is not None and "out of range [0, 1)" in generation.late_error.message


def test_the_context_limit_phrase_and_numbers_are_kept() -> None:
    with pytest.raises(WireError, match=r"maximum context length is 256 tokens.*at least 257 input tokens") as caught:
        plan(completions, {"prompt": "hello " * 300})
    assert caught.value.message.endswith("(parameter=input_tokens, value=257)")


def test_max_tokens_is_clamped_to_the_room_that_is_left() -> None:
    assert plan(completions, {"prompt": [100] * 250, "max_tokens": 100}).sampling.max_tokens == 6
    assert plan(completions, {"prompt": "a"}).sampling.max_tokens == 16
    prompt_tokens = len(plan(chat, {"messages": HELLO}).prompts[0].token_ids)
    assert plan(chat, {"messages": HELLO}).sampling.max_tokens == 256 - prompt_tokens


def test_a_full_context_leaves_no_room() -> None:
    with pytest.raises(WireError) as caught:
        plan(completions, {"prompt": [100] * 256})
    assert caught.value.param == "max_tokens"


def test_old_fields_and_unknown_fields_have_no_effect() -> None:
    assert plan(completions, {"prompt": "a", "best_of": 4, "guided_json": {"type": "nope"}, "foo": 1}).late_error is None


def test_aliases_answer_with_the_first_name_and_adapters_with_their_own() -> None:
    server = env(loras={"ad": Lora("ad", "/path", 1)})
    assert plan(completions, {"prompt": "a", "model": "alias"}, server).model == "m"
    generation = plan(completions, {"prompt": "a", "model": "ad"}, server)
    assert generation.model == "ad" and generation.lora == Lora("ad", "/path", 1)


def test_extra_eos_ids_stop_unless_eos_is_ignored() -> None:
    server = env(extra_eos_token_ids=(9,))
    assert plan(completions, {"prompt": "a", "stop_token_ids": [4]}, server).sampling.stop_token_ids == (4, 9)
    assert plan(completions, {"prompt": "a", "ignore_eos": True}, server).sampling.stop_token_ids == ()


def test_tools_need_a_parser() -> None:
    with pytest.raises(WireError, match="--enable-auto-tool-choice"):
        plan(chat, {"messages": HELLO, "tools": [TOOL]}, env(enable_auto_tool_choice=False))
    with pytest.raises(WireError, match="--tool-call-parser"):
        plan(chat, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, env(tool_call_parser=None))


def test_forced_tools_and_schemas_fix_the_answer() -> None:
    forced = plan(chat, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"})
    assert forced.answer_text == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert plan(chat, {"messages": HELLO, "tools": [TOOL]}).answer_text is None
    chosen = plan(chat, {"messages": HELLO, "structured_outputs": {"choice": ["yes"]}})
    assert chosen.answer_text == "yes"


def test_old_name_of_reasoning_is_renamed_on_input() -> None:
    shown = messages_in.for_template([{"role": "assistant", "content": "x", "reasoning_content": "why"}])
    assert shown == [{"role": "assistant", "content": "x", "reasoning": "why"}]


def test_cache_salt_rule_follows_the_release() -> None:
    assert plan(completions, {"prompt": "a", "cache_salt": "a/b" * 100}, env(version="0.32.0")).cache_salt == "a/b" * 100


def test_unknown_release_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"0\.32\.0, 0\.33\.0"):
        _ = env(version="1.0").profile


def test_batch_plans_every_conversation_and_refuses_streams() -> None:
    generation = plan(chat_batch, {"messages": [HELLO, HELLO], "max_tokens": 3})
    assert len(generation.prompts) == 2 and not generation.stream
    for fields in ({"stream": True}, {"n": 2}, {"tools": [TOOL]}):
        with pytest.raises(WireError):
            plan(chat_batch, {"messages": [HELLO]} | fields)


def test_invocations_follow_the_shape_of_the_body() -> None:
    assert plan(invocations, {"messages": HELLO}).response_id.startswith("chatcmpl-")
    assert plan(invocations, {"prompt": "a"}).response_id.startswith("cmpl-")
    with pytest.raises(WireError, match="JSON decode error") as caught:
        invocations.plan(b"{", JSON, env())
    assert caught.value.kind == "Bad Request"


def test_tokenize_both_forms_and_back() -> None:
    assert b'"count":2' in tokenize.tokenize(b'{"prompt": " apple banana"}', JSON, env())
    assert b'"token_strs":["' in tokenize.tokenize(b'{"prompt": "a", "return_token_strs": true}', JSON, env())
    chat_form = tokenize.tokenize(b'{"messages": [{"role": "user", "content": "hi"}]}', JSON, env())
    assert chat_form.startswith(b'{"count":')
    assert tokenize.detokenize(b'{"tokens": [2, 321]}', JSON, env()).startswith(b'{"prompt":"</s> ')
    for body in (b'{"tokens": [-1]}', b'{"tokens": [999999]}', b'{"tokens": [1], "model": "x"}'):
        with pytest.raises(WireError):
            tokenize.detokenize(body, JSON, env())


def test_model_cards() -> None:
    body = models.models_body(env(loras={"ad": Lora("ad", "/path", 1)})).decode()
    assert body.index('"id":"m"') < body.index('"id":"alias"') < body.index('"id":"ad"')
    assert '"root":"/path","parent":"m","max_model_len":null' in body


def test_scoring_is_a_function_of_the_prompt() -> None:
    body = b'{"query": " apple", "items": [" banana", " cherry"], "label_token_ids": [4, 5]}'
    first, again = (scoring.plan(body, JSON, env()) for _ in range(2))
    rows = [json.loads(scoring.body(planned, (), Usage(4, 2)))["data"] for planned in (first, again)]
    assert rows[0] == rows[1] and [row["index"] for row in rows[0]] == [0, 1]
    assert all(0 < row["score"] < 1 for row in rows[0])


@pytest.mark.parametrize(
    ("call", "body", "status"),
    [
        (scoring.plan, b'{"query": "a", "items": [], "label_token_ids": [1]}', 400),
        (scoring.plan, b'{"query": "a", "items": ["b"], "label_token_ids": [999999]}', 400),
        (scoring.plan, b'{"query": "a"}', 400),
        (decisions.refuse, b"{}", 400),
        (decisions.refuse, b'{"state": {}, "questions": {}}', 501),
    ],
)
def test_scoring_refusals(call: Any, body: bytes, status: int) -> None:
    with pytest.raises(WireError) as caught:
        call(body, JSON, env())
    assert caught.value.status == status


def test_repetition_detection_reaches_the_engine() -> None:
    asked = {"max_pattern_size": 8, "min_count": 3}
    assert plan(completions, {"prompt": "a", "repetition_detection": asked}).sampling.repetition == Repetition(1, 8, 3)
    assert plan(chat, {"messages": HELLO, "repetition_detection": {}}).sampling.repetition is None


@pytest.mark.parametrize(
    "asked",
    [
        {"max_pattern_size": 8},
        {"max_pattern_size": 8, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 2, "min_pattern_size": -1, "min_count": 2},
    ],
)
def test_a_repetition_rule_that_means_nothing_is_a_400(asked: dict[str, int]) -> None:
    with pytest.raises(WireError, match="repetition_detection") as caught:
        plan(completions, {"prompt": "a", "repetition_detection": asked})
    assert caught.value.status == 400


def picture(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def asked_about(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ["look", *parts, "and tell"]}]}


def test_images_stand_as_placeholders_among_the_tokens() -> None:
    server = env(media_tokens=9)
    (prompt,) = plan(chat, asked_about(picture("a.png"), picture("b.png"), picture("x", uuid="mine")), server).prompts
    first, second, third = prompt.media
    assert [item.tokens for item in prompt.media] == [9, 9, 9] and third.identifier == "mine"
    assert first.identifier != second.identifier and len(first.identifier) == 64
    for item in prompt.media:
        assert set(prompt.token_ids[item.offset : item.offset + 9]) == {server.vocabulary - 1}
    assert prompt.token_ids.count(server.vocabulary - 1) == 27
    (again,) = plan(chat, asked_about(picture("a.png")), server).prompts
    assert again.media[0] == first
    assert prompt.text is not None and messages_in.MEDIA_MARK not in prompt.text


@pytest.mark.parametrize(
    ("media_tokens", "body", "word"),
    [
        (0, asked_about(picture("a.png")), "takes text only"),
        (9, asked_about(picture("a.png"), messages_in.MEDIA_MARK), "2 places for 1"),
        (9, asked_about(picture("a.png")) | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (300, asked_about(picture("a.png")), "maximum context length"),
    ],
)
def test_images_that_cannot_be(media_tokens: int, body: dict[str, Any], word: str) -> None:
    with pytest.raises(WireError, match=word) as caught:
        plan(chat, body, env(media_tokens=media_tokens))
    assert caught.value.status == 400
