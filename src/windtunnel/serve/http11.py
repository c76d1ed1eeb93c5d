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
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from windtunnel.serve.clock import now_ns

log = logging.getLogger("windtunnel.serve")

LINE = "windtunnel.line"
_FRAME_END = b"\n\n"
_SIZES_LIMIT = 2048
_SIZES = tuple(b"%x\r\n" % size for size in range(_SIZES_LIMIT))
_SWEEP_S = 1.0
_NO_PIPELINE: deque[Any] = deque(maxlen=0)
"""What every connection has until a request is pipelined: a deque costs 0.7 KB."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may cost. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    pipelined: int = 32
    write_buffer_bytes: int = 256 * 1024


class Cork:
    """Collects what the sinks get during one turn of a driver, so that each socket is written once. One for each server."""

    __slots__ = ("_dirty", "active")

    def __init__(self) -> None:
        self.active = False
        self._dirty: list[ChunkSink] = []

    def add(self, sink: "ChunkSink") -> None:
        self._dirty.append(sink)

    def release(self) -> None:
        """End of the turn: write everything."""
        self.active = False
        dirty, self._dirty = self._dirty, []
        for sink in dirty:
            sink.flush()


class ChunkSink:
    """Writes the chunked body of one response, frame by frame. After the client has gone, writes are dropped.

    Blocked until `open` says that the head is out; from there to the last ASGI body message the transport is this sink's alone.
    """

    __slots__ = ("_cork", "_line", "_opened", "_transport", "parts")

    def __init__(self, line: "ClientLine", transport: Any, cork: Cork) -> None:
        self._line = line
        self._transport = transport
        self._cork = cork
        self._opened = False
        self.parts: list[bytes] = []
        """Chunks of this turn that are not written yet."""

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
        """One chunk for each SSE frame (they end in a blank line)."""
        if self._line.gone or not frames:
            return
        if not self.parts:
            self._cork.add(self)
        if frames.find(_FRAME_END) == len(frames) - 2:
            self.parts.append(b"%x\r\n%b\r\n" % (len(frames), frames))
        else:
            self.parts += [b"%x\r\n%b\n\n\r\n" % (len(part) + 2, part) for part in frames.split(_FRAME_END)[:-1]]
        if not self._cork.active:
            self._cork.release()

    def flush(self) -> None:
        data = b"".join(self.parts)
        self.parts.clear()
        if not self._line.gone and not self._transport.is_closing():
            self._transport.write(data)

    def lane(self, head: bytes, tail: bytes) -> "Lane":
        """The fast way for frames that are all `head`, a short text, `tail`."""
        return Lane(self, self._line, self._cork, head, tail)

    def on_writable(self, callback: Callable[[], None]) -> None:
        self._line.writable_callback = callback

    def end_cut(self) -> None:
        """Send what has been written, then close without the terminating chunk."""
        self._transport.close()

    def cut(self) -> None:
        """Close the connection without the terminating chunk."""
        self._transport.abort()


class Lane:
    """Frames of one choice that differ in a short text only: four references for each, joined at the end of the turn."""

    __slots__ = ("_cork", "_head", "_line", "_parts", "_size", "_sink", "_tail")

    def __init__(self, sink: ChunkSink, line: "ClientLine", cork: Cork, head: bytes, tail: bytes) -> None:
        self._size = len(head) + len(tail)
        self._head = head
        self._tail = tail + b"\r\n"
        self._sink = sink
        self._parts = sink.parts
        self._line = line
        self._cork = cork

    def push(self, text: bytes) -> bool:
        """Add the frame around `text`. False, and nothing done, while the reader is slow or for a frame that is too large."""
        parts = self._parts
        size = self._size + len(text)
        if self._line.blocked or size >= _SIZES_LIMIT:
            return False
        if not parts:
            self._cork.add(self._sink)
        parts += (_SIZES[size], self._head, text, self._tail)
        return True


class ClientLine:
    """What the server knows of the client behind one request. Owned by its connection."""

    __slots__ = ("_cycle", "_gone_callback", "arrived_ns", "blocked", "gone", "writable_callback")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._gone_callback: Callable[[], None] | None = None
        self.arrived_ns = 0
        """When the last byte of the request was read; 0 before, and for one that waits behind another on its connection."""
        self.gone = False
        self.blocked = False
        self.writable_callback: Callable[[], None] | None = None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call once when the client leaves; at once if it has left."""
        if self.gone:
            callback()
        else:
            self._gone_callback = callback

    def sink(self, cork: Cork) -> ChunkSink:
        return ChunkSink(self, self._cycle.transport, cork)

    def cut(self) -> None:
        """Close the connection at once."""
        self._cycle.transport.abort()

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


class LightEvent:
    """What uvicorn needs of an event, for its one waiter (`receive`), at a tenth of the size of `asyncio.Event`."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> bool:
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True


class LazyFlow(FlowControl):
    """uvicorn's flow control without an event (0.7 KB) until a write is paused."""

    __slots__ = ()

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False

    async def drain(self) -> None:
        if self.write_paused:
            await self._is_writable_event.wait()

    def pause_writing(self) -> None:
        if not self.write_paused:
            self.write_paused = True
            self._is_writable_event = asyncio.Event()

    def resume_writing(self) -> None:
        if self.write_paused:
            self.write_paused = False
            self._is_writable_event.set()


class Connection(HttpToolsProtocol):
    """One client connection. Mutable state belongs to the event loop thread."""

    __slots__ = ("_head_bytes", "_in_head", "_lines", "_refused")
    """Slots keep the instance dictionary small enough to share its keys: 1.5 KB for each connection."""

    limits = HttpLimits()
    """Replaced once, before the server starts, by `protocol_class`."""

    sweeper: "HeadSweeper"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = LazyFlow(transport)
        self.pipeline = _NO_PIPELINE
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes)
        self._lines: list[ClientLine] = []
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self.sweeper.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.sweeper.forget(self)
        super().connection_lost(exc)
        lines, self._lines = self._lines, []
        self.pipeline = _NO_PIPELINE
        for line in lines:
            if not line.answered:
                line.lost()

    def leave_http(self) -> None:
        """The connection turns out to be of another protocol: whoever takes its transport answers for it from here on."""
        self.sweeper.forget(self)
        self.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """A head is limited both by what arrives before it is complete and by what it turns out to hold."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.sweeper.watch(self)

    def on_headers_complete(self) -> None:
        self.sweeper.forget(self)
        self._in_head = False
        self._head_bytes = 0
        if self._refused:
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.head_bytes:
            self._refuse_head()
            return
        if len(self.pipeline) >= self.limits.pipelined:
            log.warning("a connection has more than %d requests waiting: cut", self.limits.pipelined)
            self._refused = True
            self.transport.abort()
            return
        self._begin_request()

    def _begin_request(self) -> None:
        """Hand the request to the application, or queue it; keep reading, so that the client's leaving is seen."""
        self._lines = [line for line in self._lines if not line.answered]
        if self._lines and not self.pipeline:
            self.pipeline = deque()
        super().on_headers_complete()
        self.cycle.message_event = LightEvent()  # type: ignore[assignment]
        line = ClientLine(self.cycle)
        self.scope[LINE] = line  # type: ignore[literal-required]
        self._lines.append(line)
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """uvicorn resumes with the application's next `receive`, which nobody needs after the last piece of a body."""
        if not self._refused:
            if self._lines and all(line.answered for line in self._lines[:-1]):
                self._lines[-1].arrived_ns = now_ns()
            super().on_message_complete()
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

    def head_late(self) -> None:
        """The sweeper's word that the head has taken too long. One who never said a word is not answered."""
        if not self._in_head or self.transport.is_closing():
            return
        if self._head_bytes:
            self._refuse(b"408 Request Timeout", b"The request head did not arrive in time.")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(b"431 Request Header Fields Too Large", b"Request headers are larger than the limit.")

    def _refuse(self, status: bytes, text: bytes) -> None:
        self._refused = True
        if not self.transport.is_closing():
            head = (
                b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            )
            self.transport.write(head % (status, len(text), text))
            self.transport.close()


class HeadSweeper:
    """The time limit of request heads, for all connections of a server: one timer, not one for each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[Connection, float] = {}
        self._armed = False

    def watch(self, connection: "Connection") -> None:
        self._since[connection] = connection.loop.time()
        self._arm(connection.loop)

    def forget(self, connection: "Connection") -> None:
        self._since.pop(connection, None)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._armed:
            self._armed = True
            loop.call_later(min(_SWEEP_S, self._timeout_s / 2), self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = False
        before = loop.time() - self._timeout_s
        for connection in [one for one, since in self._since.items() if since <= before]:
            self.forget(connection)
            connection.head_late()
        if self._since:
            self._arm(loop)


def protocol_class(limits: HttpLimits) -> type[Connection]:
    """The connection class with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "sweeper": HeadSweeper(limits.head_timeout_s)})
