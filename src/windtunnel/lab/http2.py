"""Generation requests over HTTP/2: several streams on one connection, each of which can be left without the others.

Clients that stay, and those that leave by RST_STREAM, share connections as a pool does, up to `STREAMS_MAX` at once on each; so
what a server does to the neighbours of a stream that is reset is seen. Who ends the TCP connection itself has one of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, WindowUpdated
from h2.exceptions import ProtocolError

from windtunnel.lab.connection import TLS, Connection, ConnectionCut, Head, How, MalformedResponse, Origin, whole

STREAMS_MAX = 100
"""Servers are told to allow at least so many (RFC 9113 §6.5.2)."""
CONNECTION_WINDOW_BYTES = 1 << 30
"""A stream that is not read must not stop its neighbours: only its own window shuts."""
OF_THE_CONNECTION = frozenset({How.FIN, How.RST, How.HALF_CLOSE, How.KILL})
"""Ways of leaving that end the connection."""


class Http2Pool:
    """Owns the shared connections to one origin."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._shared: list[Http2Connection] = []
        self._opening = asyncio.Lock()

    async def open(self, how: How | None) -> "Http2Stream":
        """A stream for a request that leaves by `how`. Raises OSError when nothing answers there."""
        if how in OF_THE_CONNECTION:
            return (await Http2Connection.open(self._origin, killable=how is How.KILL)).stream(alone=True)
        async with self._opening:
            self._shared = [one for one in self._shared if one.ended is None or one.streams]
            free = next((one for one in self._shared if one.has_room), None)
            if free is None:
                free = await Http2Connection.open(self._origin)
                self._shared.append(free)
            return free.stream(alone=False)

    async def close(self) -> None:
        for connection in self._shared:
            await connection.close()


class Http2Connection:
    """One connection and its streams. Owns the protocol's state and the task that reads."""

    def __init__(self, raw: Connection) -> None:
        self.raw = raw
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.streams: set[Http2Stream] = set()
        self.ended: str | None = None
        """Why it takes no further streams."""
        self._numbered: dict[int, Http2Stream] = {}
        self._window = asyncio.Event()
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
        self.flush()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(cls, origin: Origin, *, killable: bool = False) -> "Http2Connection":
        if killable:
            return cls(await Connection.open_in_process(origin))
        return cls(await (Connection.open(origin, "h2") if origin.scheme in TLS else Connection.open(origin)))

    @property
    def has_room(self) -> bool:
        return self.ended is None and len(self.streams) < min(STREAMS_MAX, self.h2.remote_settings.max_concurrent_streams)

    def stream(self, *, alone: bool) -> "Http2Stream":
        """It counts from here on; its number comes with its request."""
        stream = Http2Stream(self, alone=alone)
        self.streams.add(stream)
        return stream

    def flush(self) -> None:
        self.raw.write(self.h2.data_to_send())

    def begin(self, stream: "Http2Stream", headers: list[tuple[str, str]]) -> int:
        """Send the head of a request; the stream's number. Raises ConnectionCut."""
        if self.ended is not None:
            raise ConnectionCut(self.ended)
        number = self.h2.get_next_available_stream_id()
        self._numbered[number] = stream
        self.h2.send_headers(number, headers)
        self.flush()
        return number

    async def send(self, number: int, data: bytes, *, whole: bool) -> None:
        """The body, as far as the windows let it; the end of the stream with its last byte if `whole`. Raises ConnectionCut."""
        while data or whole:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if data and room <= 0:
                self._window.clear()
                await self._window.wait()
                if self.ended is not None:
                    raise ConnectionCut(self.ended)
                continue
            part, data = data[:room], data[room:]
            self.h2.send_data(number, part, end_stream=whole and not data)
            self.flush()
            if not data:
                return

    def forget(self, stream: "Http2Stream", number: int) -> None:
        self.streams.discard(stream)
        self._numbered.pop(number, None)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.raw.leave(How.FIN)
        await self.raw.closed()

    async def _read(self) -> None:
        problem = "the connection ended"
        try:
            while data := await self.raw.some():
                for event in self.h2.receive_data(data):
                    self._notice(event)
                self.flush()
        except ConnectionCut as error:
            problem = str(error)
        except ProtocolError as error:
            problem = f"not HTTP/2: {error}"
        self.ended = self.ended or problem
        for stream in self.streams:
            stream.push(ConnectionCut(problem))
        self._window.set()

    def _notice(self, event: Any) -> None:
        if isinstance(event, WindowUpdated):
            self._window.set()
        elif isinstance(event, ConnectionTerminated):
            self.ended = f"GOAWAY with error code {event.error_code}"
        stream = self._numbered.get(getattr(event, "stream_id", None) or 0)
        if stream is not None:
            stream.notice(event)


Arrived = Head | tuple[bytes, int] | ConnectionCut | None
"""The head, a part with its size in the windows, why it ends too early, or its end."""


class Http2Stream:
    """One exchange. Its reader takes what has arrived; only what has been taken opens the windows again."""

    def __init__(self, connection: Http2Connection, *, alone: bool) -> None:
        self._connection = connection
        self._alone = alone
        self._arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self._number = 0
        self._over = False

    async def request(self, origin: Origin, path: str, headers: Mapping[str, str], body: bytes, *, whole: bool = True) -> None:
        """Send a POST; all of it but its last byte and its end unless `whole`."""
        scheme = "https" if origin.scheme in TLS else "http"
        pairs = [(":method", "POST"), (":scheme", scheme), (":authority", origin.authority), (":path", origin.prefix + path)]
        pairs += [("user-agent", "windtunnel"), ("accept", "*/*"), ("content-type", "application/json")]
        pairs += [("content-length", str(len(body))), *((name.lower(), value) for name, value in headers.items())]
        self._number = self._connection.begin(self, pairs)
        try:
            await self._connection.send(self._number, body if whole else body[:-1], whole=whole)
        except ProtocolError as error:
            raise ConnectionCut(f"while sending: {error}") from error

    async def head(self) -> Head:
        head = await self._next()
        if not isinstance(head, Head):
            raise MalformedResponse("an HTTP/2 stream without a head")
        return head

    async def parts(self, _head: Head) -> AsyncIterator[bytes]:
        """The body, as it arrives. Raises ConnectionCut when it ends early."""
        while (part := await self._next()) is not None:
            if isinstance(part, Head):
                raise MalformedResponse("a second head")
            data, size = part
            self._taken(size)
            yield data

    def _taken(self, size: int) -> None:
        with suppress(ProtocolError):
            self._connection.h2.acknowledge_received_data(size, self._number)
            self._connection.flush()

    async def body(self, head: Head) -> bytes:
        return await whole(self.parts(head))

    def stop_reading(self) -> None:
        """Nothing to do: what nobody takes keeps the stream's window shut."""

    def leave(self, how: How) -> None:
        """On a connection of its own end that, otherwise reset the stream, unless it has ended."""
        if self._alone and how is not How.RST_STREAM:
            self._connection.raw.leave(how)
        elif not self._over and self._number:
            self._over = True
            with suppress(ProtocolError):
                self._connection.h2.reset_stream(self._number, ErrorCodes.CANCEL)
                self._connection.flush()
            self.push(ConnectionCut("reset by this client"))

    async def closed(self) -> None:
        """After `leave`: a connection of its own is gone."""
        self._connection.forget(self, self._number)
        while not self._arrived.empty():
            left = self._arrived.get_nowait()
            if isinstance(left, tuple):
                self._taken(left[1])
        if self._alone:
            await self._connection.close()

    def push(self, arrived: Arrived) -> None:
        self._arrived.put_nowait(arrived)

    def notice(self, event: Any) -> None:
        if isinstance(event, ResponseReceived):
            fields = {str(name): str(value) for name, value in event.headers}
            self.push(Head(int(fields[":status"]), fields))
        elif isinstance(event, DataReceived):
            self.push((event.data, event.flow_controlled_length))
        elif isinstance(event, StreamEnded):
            self._over = True
            self.push(None)
        elif isinstance(event, StreamReset):
            self._over = True
            self.push(ConnectionCut(f"RST_STREAM with error code {event.error_code}"))

    async def _next(self) -> Head | tuple[bytes, int] | None:
        arrived = await self._arrived.get()
        if isinstance(arrived, ConnectionCut):
            raise arrived
        return arrived
