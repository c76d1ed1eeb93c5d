"""The events of an Anthropic stream (vLLM reference §3.6)."""

from collections.abc import Mapping
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import Delta, Usage, WireError
from windtunnel.wire.vllm import parsers
from windtunnel.wire.vllm.messages_errors import error_object, named_error
from windtunnel.wire.vllm.messages_spec import MessageSpec, message_stop, message_usage, new_signature, new_tool_id


class MessageEncoder:
    """Events of one message. Mutable: the parser, the open block and how the message ends."""

    __slots__ = ("_called", "_index", "_open", "_parser", "_spec", "_started", "_stop")

    def __init__(self, spec: MessageSpec) -> None:
        self._spec = spec
        self._parser = parsers.make_parser(reasoning=spec.reasoning, tools=spec.tools)
        self._open: str | None = None
        """Kind of the open block."""
        self._index = -1
        self._started = False
        self._called = False
        self._stop: tuple[str | None, str | None] = (None, None)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        frames = [b"" if self._started else self._start()]
        frames += [self._piece(piece) for piece in self._pieces(delta)]
        if delta.finish_reason is not None:
            frames.append(self._close_block())
            self._stop = message_stop(delta.finish_reason, delta.stop_reason, self._called)
        return b"".join(frames)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """Text of an open text block, while no parser looks at it."""
        if self._parser is not None or self._open != "text":
            return None
        return _TEXT_HEAD, b'},"index":%d}\n\n' % self._index

    def close(self, usage: Usage) -> bytes:
        reason, sequence = self._stop
        told = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": message_usage(usage, self._spec)}
        return _event("message_delta", told) + _event("message_stop", {})

    def error(self, error: WireError) -> bytes:
        return self._close_block() + _event("error", {"error": error_object(named_error(error, self._spec.env))})

    def _pieces(self, delta: Delta) -> list[parsers.Piece]:
        if self._parser is None:
            return [parsers.Piece("content", delta.text)] if delta.text else []
        pieces = self._parser.push(delta.text)
        return pieces + self._parser.finish() if delta.finish_reason is not None else pieces

    def _start(self) -> bytes:
        self._started = True
        spec = self._spec
        message: dict[str, Any] = {
            "id": spec.response_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": spec.model,
        }
        message |= {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": spec.prompt_tokens, "output_tokens": 0}
        return _event("message_start", {"message": message})

    def _piece(self, piece: parsers.Piece) -> bytes:
        if piece.call > 0 and not self._spec.parallel_tool_calls:
            return b""
        if piece.kind == "name":
            self._called = True
            block = {"type": "tool_use", "id": new_tool_id(self._spec), "name": piece.text, "input": {}}
            return self._open_block("tool_use", block)
        kind, member, delta_type = _DELTAS[piece.kind]
        opened = b"" if self._open == kind else self._open_block(kind, {"type": kind, member: ""})
        return opened + self._delta({"type": delta_type, member: piece.text})

    def _open_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close_block()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", {"content_block": block, "index": self._index})

    def _close_block(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": new_signature(self._spec)})
        return signed + _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"delta": delta, "index": self._index})


_DELTAS = {
    "content": ("text", "text", "text_delta"),
    "reasoning": ("thinking", "thinking", "thinking_delta"),
    "arguments": ("tool_use", "partial_json", "input_json_delta"),
}
"""Block kind, member and delta type of each kind of piece."""
_TEXT_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":'


def _event(kind: str, told: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), http.dumps({"type": kind} | dict(told)))
