"""The one module that touches uvicorn's insides.

vLLM and SGLang run on uvicorn with httptools, so framing, header order, keep-alive, half-close and the parser's own 400
texts are the real servers' when we run on it too. This subclass adds what a test bench needs on top:

* a `ClientLine` per request (in the ASGI scope under `LINE`): it tells when the client has gone, whatever the phase, and
  hands out a `ChunkSink` that writes frames straight to the transport;
* limits: size of the head, time for the head, pipelined requests, and (in `read_body`) size of the body.

uvicorn marks only the newest request of a connection as disconnected and stops reading while a pipelined one waits,
which hides the client's leaving from the one being answered. Here every request of the connection is told.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

LINE = "windtunnel.line"
_FRAME_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may cost. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    pipelined: int = 32
    write_buffer_bytes: int = 256 * 1024


class ChunkSink:
    """Writes the chunked body of one response, frame by frame. After the client has gone, writes are dropped.

    Blocked until `open` says that the head is out; from there to the last ASGI body message the transport is this sink's alone.
    """

    __slots__ = ("_line", "_opened", "_transport")

    def __init__(self, line: "ClientLine", transport: Any) -> None:
        self._line = line
        self._transport = transport
        self._opened = False

    def open(self) -> None:
        """The head has been sent."""
        self._opened = True
        if not self._line.blocked:
            self._line.set_blocked(False)

    @property
    def blocked(self) -> bool:
        """Hold frames back until `on_writable` calls: no head yet, or the client reads too slowly."""
        return self._line.blocked or not self._opened

    def write(self, frames: bytes) -> None:
        """One chunk for each SSE frame (they end in a blank line), all in one write."""
        if self._line.gone or not frames:
            return
        if frames.find(_FRAME_END) == len(frames) - 2:
            self._transport.write(b"%x\r\n%b\r\n" % (len(frames), frames))
        else:
            parts = frames.split(_FRAME_END)[:-1]
            self._transport.write(b"".join([b"%x\r\n%b\n\n\r\n" % (len(part) + 2, part) for part in parts]))

    def on_writable(self, callback: Callable[[], None]) -> None:
        self._line.writable_callback = callback

    def end_cut(self) -> None:
        """Send what has been written, then close without the terminating chunk."""
        self._transport.close()

    def cut(self) -> None:
        """Close the connection without the terminating chunk."""
        self._transport.abort()


class ClientLine:
    """What the server knows of the client behind one request. Owned by its connection."""

    __slots__ = ("_cycle", "_gone_callback", "gone", "blocked", "writable_callback")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._gone_callback: Callable[[], None] | None = None
        self.gone = False
        self.blocked = False
        self.writable_callback: Callable[[], None] | None = None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call once when the client leaves; at once if it has left."""
        if self.gone:
            callback()
        else:
            self._gone_callback = callback

    def sink(self) -> ChunkSink:
        return ChunkSink(self, self._cycle.transport)

    def lost(self) -> None:
        self._cycle.disconnected = not self._cycle.response_complete
        self._cycle.message_event.set()
        if self.gone:
            return
        self.gone = True
        callback, self._gone_callback = self._gone_callback, None
        if callback is not None:
            callback()

    def set_blocked(self, blocked: bool) -> None:
        self.blocked = blocked
        if not blocked and self.writable_callback is not None:
            self.writable_callback()

    @property
    def answered(self) -> bool:
        return self._cycle.response_complete



class Connection(HttpToolsProtocol):
    """One client connection. Mutable state belongs to the event loop thread."""

    limits = HttpLimits()
    """Replaced once, before the server starts, by `protocol_class`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes)
        self._lines: list[ClientLine] = []
        self._head_bytes = 0
        self._in_head = True
        self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)
        lines, self._lines = self._lines, []
        self.pipeline.clear()
        for line in lines:
            if not line.answered:
                line.lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        if self.parser is None or self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", b"Request headers are larger than the limit.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_late)

    def on_headers_complete(self) -> None:
        self._head_timer.cancel()
        self._in_head = False
        self._head_bytes = 0
        self._lines = [line for line in self._lines if not line.answered]
        super().on_headers_complete()
        line = ClientLine(self.cycle)
        self.scope[LINE] = line  # type: ignore[typeddict-unknown-key]
        self._lines.append(line)
        if len(self.pipeline) < self.limits.pipelined:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._tell_blocked(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._tell_blocked(False)

    def _tell_blocked(self, blocked: bool) -> None:
        for line in self._lines:
            if not line.answered:
                line.set_blocked(blocked)
                return

    def _head_late(self) -> None:
        if self._in_head and self._head_bytes and not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", b"The request head did not arrive in time.")

    def _refuse(self, status: bytes, text: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        self.transport.write(head % (status, len(text), text))
        self.transport.close()


def protocol_class(limits: HttpLimits) -> type[Connection]:
    """The connection class with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
