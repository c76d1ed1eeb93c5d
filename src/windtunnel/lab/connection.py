"""One HTTP/1.1 exchange on one socket, with control over how it ends.

An ordinary client library hides what this lab is about: which bytes have left, and whether a connection ends with FIN,
with RST or with only its sending side shut. So this is a small client of our own: one connection carries one request;
every read has a limit; bodies are chunked, counted or read until the end.

A FIN is a FIN only while the kernel holds no unread bytes (Linux answers `close` with unread data by RST); the reader
drains the socket all the time, so that is the usual case.
"""

import asyncio
import json
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windtunnel.lab.trust import USUAL, Trust

HEAD_LIMIT_BYTES = 64 * 1024
CHUNK_LIMIT_BYTES = 4 * 1024 * 1024
BODY_LIMIT_BYTES = 32 * 1024 * 1024
INFORMATIONAL_LIMIT = 8
_NO_BODY = frozenset({204, 304})
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_READ_BYTES = 64 * 1024
_RELAY = Path(__file__).with_name("relay.py")
_SMALL_BUFFER_BYTES = 4096


class How(Enum):
    """How a client leaves. The first three are ends of one socket (`Connection.leave`), the others are procedures."""

    FIN = "fin"
    RST = "rst"
    HALF_CLOSE = "half-close"
    STOP_READING = "stop-reading"
    """Reads nothing more for a while (a slow loris on the response), then closes."""
    TIMEOUT_RETRY = "timeout-retry"
    """Closes, as a client does whose time is up, and sends the same request again."""
    ABORT_ID = "abort-id"
    """Stays, and has its request aborted by id."""
    KILL = "kill"
    """The client's process is killed (SIGKILL)."""
    RST_STREAM = "rst-stream"
    """HTTP/2 and gRPC: this stream alone is reset (CANCEL), its connection stays. It is what cancelling a gRPC call sends."""
    DEADLINE = "deadline"
    """gRPC: the deadline that the call was made with passes."""


class ConnectionCut(Exception):
    """The peer ended the connection before the message was complete."""


class MalformedResponse(Exception):
    """The peer sent something that is not HTTP/1.1, or more of it than the limits allow."""


TLS = frozenset({"https", "h2", "grpcs"})
HTTP2 = frozenset({"h2", "h2c"})
GRPC = frozenset({"grpc", "grpcs"})
SCHEMES = frozenset({"http", *TLS, *HTTP2, *GRPC})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and the path prefix that every request gets.

    `h2` is HTTP/2 over TLS, `h2c` without (prior knowledge). Whatever is no generation goes by HTTP/1.1 there, too.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    trust: Trust = USUAL

    @property
    def root(self) -> "Origin":
        """Without the prefix."""
        return replace(self, prefix="")

    def unwelcome(self, error: Exception) -> str:
        """A hint where the server has ended a TLS connection before it answered: by alert, reset or the end of the stream."""
        ours = isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or "")
        return "" if ours or self.scheme not in TLS else self.trust.missing

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_origin(url: str) -> Origin:
    """Raises ValueError with the right form in the message."""
    form = (
        f"{url!r} is not a base URL: write http://HOST:PORT or https://HOST[:PORT][/PREFIX], h2c:// or h2:// for HTTP/2,"
        " grpc://HOST:PORT for a gRPC worker"
    )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{form} ({error})") from None
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(form)
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url.partition('?')[0]!r}: a base URL has no query, fragment or user; send keys with --header")
    if parts.scheme in GRPC and (parts.port is None or parts.path.strip("/")):
        raise ValueError(f"{url!r}: a gRPC worker has a port and no path: write {parts.scheme}://HOST:PORT")
    port = parts.port or (443 if parts.scheme in TLS else 80)
    return Origin(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Mapping[str, str]
    """Names in lower case; of repeated headers the last."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def request_bytes(method: str, origin: Origin, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The exact bytes of one request."""
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", f"host: {origin.authority}", "user-agent: windtunnel", "accept: */*"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


class Connection:
    """One open socket. Owned by the coroutine that opened it, which also ends it with `leave`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._process = process

    @classmethod
    async def open(cls, origin: Origin, *alpn: str) -> "Connection":
        """`alpn`: the protocols that are offered over TLS. Raises OSError when nothing answers there."""
        context = origin.trust.context() if origin.scheme in TLS else None
        if context is not None and alpn:
            context.set_alpn_protocols(alpn)
        try:
            reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context, limit=HEAD_LIMIT_BYTES)
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
            raise OSError(f"{error}{origin.unwelcome(error)}") from error
        raw = writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer)

    @classmethod
    async def open_in_process(cls, origin: Origin) -> "Connection":
        """A connection that a process of its own holds (`lab.relay`), so that the process can be killed. No TLS."""
        if origin.scheme in TLS:
            raise OSError("kill: a client process of its own speaks no TLS")
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-I", "-S", str(_RELAY), origin.host, str(origin.port))
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=HEAD_LIMIT_BYTES
        )
        assert process.stdout is not None and process.stdin is not None
        return cls(process.stdout, process.stdin, process)

    async def closed(self) -> None:
        """After `leave`: the process of the connection, if it has one, is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def stop_reading(self) -> None:
        """The socket stays open and nothing more is taken from it; the kernel's buffer is made as small as it can be."""
        raw = self._writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport reads, too

    async def request(self, origin: Origin, path: str, headers: Mapping[str, str], body: bytes, *, whole: bool = True) -> None:
        """Send a POST; all of it but its last byte unless `whole`."""
        data = request_bytes("POST", origin, path, headers, body)
        await self.send(data if whole else data[:-1])

    async def some(self) -> bytes:
        """What has arrived, as soon as there is something; nothing at the end."""
        try:
            return await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise ConnectionCut(str(error)) from error

    def write(self, data: bytes) -> None:
        """Hand over without waiting for room."""
        if data and not self._writer.transport.is_closing():
            self._writer.write(data)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ConnectionCut(f"while sending: {error}") from error

    async def head(self) -> Head:
        """The head of the final response; informational ones are skipped."""
        for _ in range(INFORMATIONAL_LIMIT):
            head = _parse_head(await self._until(b"\r\n\r\n"))
            if head.status >= 200:
                return head
        raise MalformedResponse(f"more than {INFORMATIONAL_LIMIT} informational responses")

    async def ask(self, request: bytes, origin: Origin) -> Head:
        """Send a whole request, for the head of its response."""
        try:
            await self.send(request)
            return await self.head()
        except (ConnectionCut, OSError) as error:
            raise ConnectionCut(f"{error}{origin.unwelcome(error)}") from error

    async def parts(self, head: Head) -> AsyncIterator[bytes]:
        """The body without its framing, as it arrives. Raises ConnectionCut when it ends early."""
        if head.status in _NO_BODY:
            return
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            source = self._chunks()
        elif "content-length" in head.headers:
            source = self._counted(_length(head.headers["content-length"]))
        else:
            source = self._to_end()
        async for part in source:
            yield part

    async def body(self, head: Head) -> bytes:
        return await whole(self.parts(head))

    def leave(self, how: How) -> None:
        """End this side: FIN closes, RST resets, HALF_CLOSE shuts the sending side and leaves the socket readable.

        KILL kills the process that holds the socket. The other ways close like FIN.
        """
        if how is How.KILL and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            return
        if how is How.HALF_CLOSE:
            if self._writer.can_write_eof() and not self._writer.transport.is_closing():
                self._writer.write_eof()
            return
        if how is How.RST:
            raw = self._writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if self._process is None or not self._writer.transport.is_closing():
            self._writer.transport.abort()

    async def _until(self, separator: bytes) -> bytes:
        try:
            return await self._reader.readuntil(separator)
        except asyncio.IncompleteReadError as error:
            raise ConnectionCut(f"end of stream after {len(error.partial)} bytes of a line or head") from error
        except asyncio.LimitOverrunError as error:
            raise MalformedResponse(f"a line or head over {HEAD_LIMIT_BYTES} bytes") from error
        except OSError as error:
            raise ConnectionCut(str(error)) from error

    async def _exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise ConnectionCut(f"end of stream after {len(error.partial)} of {count} bytes") from error
        except OSError as error:
            raise ConnectionCut(str(error)) from error

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := _chunk_size(await self._until(b"\r\n")):
            part = await self._exactly(size + 2)
            if not part.endswith(b"\r\n"):
                raise MalformedResponse("a chunk longer than its size line says")
            yield part[:-2]
        while await self._until(b"\r\n") != b"\r\n":
            pass

    async def _counted(self, length: int) -> AsyncIterator[bytes]:
        while length:
            part = await self._exactly(min(length, _READ_BYTES))
            length -= len(part)
            yield part

    async def _to_end(self) -> AsyncIterator[bytes]:
        try:
            while part := await self._reader.read(_READ_BYTES):
                yield part
        except OSError as error:
            raise ConnectionCut(str(error)) from error


async def fetch(
    origin: Origin, method: str, path: str, headers: Mapping[str, str], payload: Mapping[str, Any] | None = None
) -> Answer:
    """One whole request and response on a fresh connection. Raises OSError, ConnectionCut or MalformedResponse."""
    body = None if payload is None else json.dumps(payload).encode()
    connection = await Connection.open(origin)
    try:
        head = await connection.ask(request_bytes(method, origin, path, headers, body), origin)
        return Answer(head.status, head.headers, await connection.body(head))
    finally:
        connection.leave(How.FIN)


def _parse_head(raw: bytes) -> Head:
    first, *rest = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    version, _, after = first.partition(" ")
    status = after[:3]
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise MalformedResponse(f"not an HTTP/1.1 status line: {first[:80]!r}")
    pairs = (line.partition(":") for line in rest)
    return Head(int(status), {name.strip().lower(): value.strip() for name, _, value in pairs})


def _chunk_size(line: bytes) -> int:
    text = line.split(b";")[0].strip()
    try:
        size = int(text, 16)
    except ValueError:
        raise MalformedResponse(f"not a chunk size: {text[:40]!r}") from None
    if not 0 <= size <= CHUNK_LIMIT_BYTES:
        raise MalformedResponse(f"a chunk of {size} bytes; the limit is {CHUNK_LIMIT_BYTES}")
    return size


def _length(text: str) -> int:
    if not text.isdigit() or int(text) > BODY_LIMIT_BYTES:
        raise MalformedResponse(f"content-length {text[:40]!r} is not a number up to {BODY_LIMIT_BYTES}")
    return int(text)


async def whole(parts: AsyncIterator[bytes]) -> bytes:
    """A body in one piece. Raises MalformedResponse when it is over `BODY_LIMIT_BYTES`, and what `parts` raises."""
    out = bytearray()
    async for part in parts:
        out += part
        if len(out) > BODY_LIMIT_BYTES:
            raise MalformedResponse(f"a body over {BODY_LIMIT_BYTES} bytes")
    return bytes(out)
