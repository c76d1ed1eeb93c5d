"""The request APIs that a storm speaks: what a request looks like, and how an answer is read.

Every answer, an event of a stream or a whole body, is put into the shape of OpenAI's chunks (`choices` with `index`, `text` and
`finish_reason`; `error`; `id`; `done` for the terminator), which is all that the client reads. Facts: vLLM reference §2 and §3,
SGLang reference §7.2.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from windtunnel.lab.plan import Api
from windtunnel.lab.record import Ask

Payload = dict[str, Any]


class Reader(Protocol):
    """Reads the answer to one request. Owned by the request's recorder."""

    def event(self, payload: Payload) -> Payload:
        """One event of a stream, as an OpenAI chunk."""

    def whole(self, payload: Payload) -> Payload:
        """A whole body, as one OpenAI chunk."""


class Dialect(NamedTuple):
    body: Callable[[str, Ask], Payload]
    """Of model and request, without `stream`."""
    reader: Callable[[], Reader]
    fixed_length: bool = True
    """Whether a request can ask for all of its tokens, whatever the model would say."""


def _options(ask: Ask, budget: str) -> Payload:
    """Greedy and of a fixed length; greedy decoding takes one choice only (vLLM reference §2.2)."""
    options = {budget: ask.max_tokens, "temperature": 0, "ignore_eos": True}
    return options | ({"n": ask.n, "temperature": 1} if ask.n > 1 else {})


def _completion_body(model: str, ask: Ask) -> Payload:
    return {"model": model, "prompt": ask.prompt, **_options(ask, "max_tokens")}


def _turn(ask: Ask) -> list[Payload]:
    return [{"role": "user", "content": ask.prompt}]


def _chat_body(model: str, ask: Ask) -> Payload:
    return {"model": model, "messages": _turn(ask), **_options(ask, "max_tokens")}


def _generate_body(_model: str, ask: Ask) -> Payload:
    """The request id travels as `rid`, by which it can be aborted."""
    rid = {"rid": ask.request_id} if ask.request_id else {}
    return {"text": ask.prompt, "sampling_params": _options(ask, "max_new_tokens"), **rid}


def _messages_body(model: str, ask: Ask) -> Payload:
    """Anthropic's API knows no `ignore_eos`: an answer may end early."""
    return {"model": model, "messages": _turn(ask), "max_tokens": ask.max_tokens, "temperature": 0}


def _responses_body(model: str, ask: Ask) -> Payload:
    options = {"max_output_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True, "store": False}
    return {"model": model, "input": ask.prompt, **options}


class _OpenAi:
    def event(self, payload: Payload) -> Payload:
        return payload

    def whole(self, payload: Payload) -> Payload:
        return payload


class _Generate:
    """SGLang's own API: texts are cumulative, unless the server runs with `--incremental-streaming-output`."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def event(self, payload: Payload) -> Payload:
        if payload.get("error") is not None:
            return payload
        index = payload.get("index") or 0
        text, before = payload.get("text") or "", self._texts.get(index, "")
        meta = payload.get("meta_info") or {}
        new = text[len(before) :] if self._cumulative(payload, meta, before) else text
        self._texts[index] = before + new
        reason = (meta.get("finish_reason") or {}).get("type")
        return {"id": meta.get("id"), "choices": [{"index": index, "text": new, "finish_reason": reason}]}

    @staticmethod
    def _cumulative(payload: Payload, meta: Payload, before: str) -> bool:
        """An event with as many ids as tokens have been made has all of the text."""
        ids, made = payload.get("output_ids"), meta.get("completion_tokens")
        return len(ids) >= made if ids is not None and made else (payload.get("text") or "").startswith(before)

    def whole(self, payload: Payload) -> Payload:
        """Several choices come as a list."""
        parts = payload.get("list", [payload])
        chunks = [_Generate().event({"index": index, **part}) for index, part in enumerate(parts)]
        return {**chunks[0], "choices": [choice for chunk in chunks for choice in chunk.get("choices", ())]}


class _Messages:
    """Anthropic's API: the terminator is `message_stop`, and the stop reason comes in the event before."""

    def event(self, payload: Payload) -> Payload:
        kind = payload.get("type")
        if kind == "message_start":
            return {"id": (payload.get("message") or {}).get("id")}
        if kind == "content_block_delta":
            return _chunk((payload.get("delta") or {}).get("text"))
        if kind == "message_delta":
            return _chunk("", (payload.get("delta") or {}).get("stop_reason"))
        return {"done": kind == "message_stop", "error": payload.get("error")}

    def whole(self, payload: Payload) -> Payload:
        text = "".join(part.get("text") or "" for part in payload.get("content") or ())
        return {"id": payload.get("id"), "error": payload.get("error"), **_chunk(text, payload.get("stop_reason"))}


_ENDS = ("response.completed", "response.incomplete", "response.failed")


class _Responses:
    """OpenAI's Responses: one of three terminal events, with the status that the finish reason is."""

    def event(self, payload: Payload) -> Payload:
        kind, response = payload.get("type"), payload.get("response") or {}
        if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            return _chunk(payload.get("delta"))
        if kind in _ENDS:
            error = response.get("error") if kind == "response.failed" else None
            return {"id": response.get("id"), "done": True, "error": error, **_chunk("", response.get("status"))}
        return {"id": response.get("id"), "error": payload.get("error") or (payload if kind == "error" else None)}

    def whole(self, payload: Payload) -> Payload:
        parts = [part for item in payload.get("output") or () for part in item.get("content") or ()]
        text = "".join(part.get("text") or "" for part in parts)
        return {"id": payload.get("id"), "error": payload.get("error"), **_chunk(text, payload.get("status"))}


def _chunk(text: str | None, reason: str | None = None) -> Payload:
    return {"choices": [{"index": 0, "text": text or "", "finish_reason": reason}]}


DIALECTS: Mapping[Api, Dialect] = {
    Api.COMPLETIONS: Dialect(_completion_body, _OpenAi),
    Api.CHAT: Dialect(_chat_body, _OpenAi),
    Api.GENERATE: Dialect(_generate_body, _Generate),
    Api.MESSAGES: Dialect(_messages_body, _Messages, fixed_length=False),
    Api.RESPONSES: Dialect(_responses_body, _Responses),
}
