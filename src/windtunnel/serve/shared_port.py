"""HTTP and gRPC on one port (`--grpc-on-http-port`): who begins with the preface of HTTP/2 is handed to the gRPC listener.

grpc takes no connection from another listener. So its own is a Unix socket in a private folder, and the bytes of such a
connection go to and fro between the two. Back-pressure passes through, and whichever side ends, the other ends at once: a
client that vanishes is as gone to grpc as on a port of its own.
"""

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

from windtunnel.serve.http11 import Connection

log = logging.getLogger("windtunnel.serve")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113 §3.4. No request of HTTP/1.1 begins with these bytes."""


class GrpcRelay:
    """Owns the folder of the Unix socket and all relayed connections, of which there are `limit` at most."""

    def __init__(self, limit: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="windtunnel-"))
        self._limit = limit
        self._pipes: set[Pipe] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def path(self) -> Path:
        """Where grpc listens."""
        return self._folder / "grpc"

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Relay this connection from here on; `first` has been read from it already."""
        if len(self._pipes) >= 2 * self._limit:
            log.warning("more than %d gRPC connections: cut", self._limit)
            transport.abort()
            return
        client = Pipe(self._pipes)
        client.connection_made(transport)
        transport.set_protocol(client)
        transport.pause_reading()
        task = asyncio.ensure_future(self._join(client, first))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _join(self, client: "Pipe", first: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            far, _ = await loop.create_unix_connection(lambda: Pipe(self._pipes, client), str(self.path))
        except OSError as error:
            log.warning("gRPC does not take connections: %s", error)
            client.transport.abort()
            return
        far.write(first)
        client.transport.resume_reading()

    def close(self) -> None:
        for pipe in list(self._pipes):
            pipe.transport.abort()
        for task in self._connecting:
            task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)


class Pipe(asyncio.Protocol):
    """One end of a relayed connection: what arrives here is written to the other end."""

    transport: asyncio.Transport

    def __init__(self, pipes: "set[Pipe]", other: "Pipe | None" = None) -> None:
        """`pipes` holds all that are open. Without `other`, which comes first, the other end is still to come."""
        self._pipes = pipes
        self._other = other

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._pipes.add(self)
        if self._other is None:
            return
        self._other._other = self
        if self._other not in self._pipes:
            transport.close()

    def data_received(self, data: bytes) -> None:
        assert self._other is not None
        self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipes.discard(self)
        if self._other is not None:
            self._other.transport.close()


class SharedConnection(Connection):
    """A connection that turns out to be HTTP/1.1 or HTTP/2 with its first bytes. The limits of heads hold until then."""

    __slots__ = ("_first",)

    relay: GrpcRelay
    """Set once, before the server starts, by `shared`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._first: bytes | None = b""

    def data_received(self, data: bytes) -> None:
        if self._first is None:
            super().data_received(data)
            return
        first = self._first + data
        if first.startswith(PREFACE):
            self.leave_http()
            self.relay.take(self.transport, first)
        elif PREFACE.startswith(first):
            self._first = first
        else:
            self._first = None
            super().data_received(first)


def shared(base: type[Connection], relay: GrpcRelay) -> type[Connection]:
    """`base`, a class with its limits, for a port that both protocols share."""
    return type("SharedLimitedConnection", (SharedConnection, base), {"relay": relay})
