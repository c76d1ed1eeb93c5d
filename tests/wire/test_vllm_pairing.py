"""What a balancer makes of one request for a prefill and a decode (vLLM reference §7.4)."""

from typing import Any

import pytest

from windtunnel.wire.vllm.pairing import CachedTokens, cached_tokens, prefill_body

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "limits"),
    [
        (CHAT, {"max_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}),
        ("/v1/completions", {}, {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}),
        ("/v1/messages", {"max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 1}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"max_tokens": 9, "seed": 1}},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "seed": 1}},
        ),
    ],
)
def test_the_prefill_makes_one_token(path: str, body: dict[str, Any], limits: dict[str, Any]) -> None:
    told = prefill_body(path, body | {"stream": True, "stream_options": {}})
    assert told.pop("kv_transfer_params")["do_remote_decode"] is True
    assert told == limits | {"stream": False}


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ({}, 0),
        ({"usage": None}, 0),
        ({"usage": {"prompt_tokens_details": None}}, 0),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 16}}}, 16),
    ],
)
def test_what_the_prefill_had_cached(answer: dict[str, Any], count: int) -> None:
    assert cached_tokens(answer) == count


@pytest.mark.parametrize("text", [b"", b"not json", b"[1]", b'{"usage":null}', b'{"a":{"usage":{}}}'])
def test_an_answer_without_usage_stays_as_it_is(text: bytes) -> None:
    assert CachedTokens(CHAT, 3).whole(text) == text


def test_an_answer_that_says_so_already_keeps_its_spaces() -> None:
    text = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 3}}}'
    assert CachedTokens(CHAT, 3).whole(text) == text
    assert CachedTokens(CHAT, 4).whole(text) == b'{"usage":{"prompt_tokens_details":{"cached_tokens":4}}}'
    assert CachedTokens("/v1/messages", 4).whole(text) == text, "another family's usage has no such member"


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    stream = b': hi\n\ndata: {"text":"\xc3\xa9\xe2\x80\xa8"}\n\ndata: {"usage":{}}\r\n\r\ndata: [DONE]\n\ndata: {"usage":{}}'
    counts = CachedTokens(CHAT, 2)
    out = b"".join(counts.part(stream[at : at + size]) for at in range(0, len(stream), size)) + counts.end()
    told = b'{"usage":{"prompt_tokens_details":{"cached_tokens":2}}}'
    assert out == stream.replace(b'{"usage":{}}', told)
