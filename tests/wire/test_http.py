"""Reading a JSON body as FastAPI and vLLM do, and the envelopes of what goes wrong (vLLM reference §2.6)."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.vllm_env import JSON, env

from windtunnel.wire import http
from windtunnel.wire.family import Family, WireError
from windtunnel.wire.vllm import chat, chat_request, completions


def _error(body: bytes, content_type: str | None = "application/json") -> WireError:
    headers = {} if content_type is None else {"content-type": content_type}
    with pytest.raises(WireError) as caught:
        completions.plan(body, headers, env())
    return caught.value


@pytest.mark.parametrize("content_type", ["text/plain", "application/vnd.api+json", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(content_type: str | None) -> None:
    error = _error(b'{"prompt": "a"}', content_type)
    assert (error.status, error.kind, error.param) == (400, "Bad Request", None)
    assert error.message == "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON"])
def test_parameters_and_case_of_the_content_type_are_free(content_type: str) -> None:
    assert completions.plan(b'{"prompt": "a"}', {"content-type": content_type}, env()).model == "m"


@pytest.mark.parametrize(("body", "offset"), [(b"{", 1), (b'{"prompt": ', 11), (b'{"a":1}x', 7), (b"nope", 0)])
def test_malformed_json_is_located_at_its_offset(body: bytes, offset: int) -> None:
    error = _error(body)
    assert (error.kind, error.param) == ("Bad Request", f"body.{offset}")
    assert error.message.startswith("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.")


@pytest.mark.parametrize("body", [b'{"prompt":"\xff\xfe"}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_what_the_json_parser_cannot_read_is_fastapis_own_error(body: bytes) -> None:
    error = _error(body)
    assert http.error_body(error) == b'{"detail":"There was an error parsing the body"}'
    assert error.status == 400


def test_no_body_is_a_missing_body() -> None:
    assert _error(b"").message == (
        "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}"
    )


@pytest.mark.parametrize(("body", "shown"), [(b"[1,2]", "<list of 2 items>"), (b'"hi"', "hi"), (b"5", "5"), (b"null", "None")])
def test_a_body_must_be_an_object(body: bytes, shown: str) -> None:
    error = _error(body)
    assert "'type': 'model_attributes_type'" in error.message
    assert f"'input': '{shown}'" in error.message


def test_at_most_ten_lines_are_shown() -> None:
    body = json.dumps({"messages": [{"content": 1}] * 3}).encode()
    with pytest.raises(WireError) as caught:
        chat.plan(body, JSON, env())
    lines = caught.value.message.split("\n")
    assert len(lines) == 12
    assert lines[-1].startswith("  ...and ")
    total = int(lines[0].split()[0])
    assert lines[-1] == f"  ...and {total - 10} more errors"


@pytest.mark.parametrize(
    ("loc", "value", "place"),
    [
        (("prompt", "list[constrained-int]", 0), {"prompt": [-1]}, "body.prompt.0"),
        (("response_format", "ResponseFormat", "type"), {"response_format": {"type": "x"}}, "body.response_format.type"),
        (("messages", 0, "SomeParam", "content", "str"), {"messages": [{"content": 5}]}, "body.messages.0.SomeParam.content"),
        (("messages", 0, "SomeParam", "role"), {"messages": [{}]}, "body.messages.0.SomeParam.role"),
        (("vllm_xargs", "Str", "int"), {"vllm_xargs": {"Str": {}}}, "body.vllm_xargs.Str"),
        (("tool_choice", "literal['none']"), {"tool_choice": "x"}, "body.tool_choice"),
    ],
)
def test_names_of_union_members_are_shown_behind_an_index_only(loc: tuple[int | str, ...], value: object, place: str) -> None:
    assert http.location(loc, value) == place


def test_envelopes() -> None:
    error = WireError("why", 404, "NotFoundError", "model")
    assert http.error_body(error) == b'{"error":{"message":"why","type":"NotFoundError","param":"model","code":404}}'
    assert http.error_body(http.unauthorized()) == b'{"error":"Unauthorized"}'
    assert http.error_body(http.not_found()) == b'{"detail":"Not Found"}'
    assert http.body_too_large(10).status == 413
    frame = http.error_frames(error, spaced=True)
    assert frame.startswith(b'data: {"error": {"message": "why"')
    assert frame.endswith(b"\n\ndata: [DONE]\n\n")
    assert http.error_frames(error, spaced=False).startswith(b'data: {"error":{"message":"why"')


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "a"]), inner)
    ),
    max_leaves=6,
)


def _plans_or_refuses(family: Family, body: bytes) -> None:
    refused = None
    try:
        family.plan(body, JSON, env())
    except WireError as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        json.loads(http.error_body(refused))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(chat_request.ChatCompletionRequest.model_fields)), VALUES, max_size=4))
def test_no_chat_body_does_anything_but_plan_or_refuse(fields: dict[str, object]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode()
    _plans_or_refuses(chat, body)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(completions.CompletionRequest.model_fields)), VALUES, max_size=4))
def test_no_completion_body_does_anything_but_plan_or_refuse(fields: dict[str, object]) -> None:
    body = json.dumps({"prompt": "hi"} | fields).encode()
    _plans_or_refuses(completions, body)
