"""Small ASGI helpers: reading a bounded body, writing JSON."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from windtunnel.wire.family import WireError
from windtunnel.wire.http import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
_DISCARD_FACTOR = 4
"""An oversized body is read and thrown away up to this many times the limit, so that the client gets the 413."""
_LINGER_S = 5.0
"""So long the same is done for a body that its head announced as too large, behind the 413."""

_TOO_LARGE = 413
_UNREAD_BODY = (408, _TOO_LARGE)


class BodyTooLarge(Exception):
    """The body is over the limit; what has been read of it is thrown away."""


class BodyTimeout(Exception):
    """The body did not arrive in time."""


class ClientGone(Exception):
    """The client left while its request was being read."""


async def read_body(receive: Receive, limit_bytes: int, timeout_s: float, declared_bytes: int | None = None) -> bytes:
    """The whole body, or one of the three exceptions above. One that is `declared_bytes` too large is not read at all."""
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise BodyTooLarge
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size <= limit_bytes:
                    parts.append(part)
                elif size > _DISCARD_FACTOR * limit_bytes:
                    raise BodyTooLarge
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise BodyTimeout from None
    if size > limit_bytes:
        raise BodyTooLarge
    return parts[0] if len(parts) == 1 else b"".join(parts)


def declared_bytes(scope: Scope) -> int | None:
    """The `Content-Length`, which the parser has checked."""
    told = header_of(scope, "content-length")
    return int(told) if told is not None and told.isdecimal() else None


class Unread(NamedTuple):
    """A request body that may not have been read to its end."""

    receive: Receive
    limit_bytes: int


async def _linger(unread: Unread) -> None:
    """Read on for a while: a connection closed over unread data is reset, and the answer may be lost with it."""
    left = _DISCARD_FACTOR * unread.limit_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0:
                message = await unread.receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Header names in lower case; of a repeated header the first value counts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def header_of(scope: Scope, name: str) -> str | None:
    """One header by its lower-case name."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes | None = JSON,
    headers: Iterable[tuple[bytes, bytes]] = (),
    unread: Unread | None = None,
) -> None:
    """A whole answer. Header order is the real servers': content-length, content-type.

    After a body that was not read to its end the connection is closed, so that the rest of it is nobody's work; `unread` is
    where the rest would come from.
    """
    fields: list[tuple[bytes, bytes]] = [(b"connection", b"close")] if status in _UNREAD_BODY else []
    fields += [(b"content-length", b"%d" % len(body))]
    if content_type is not None:
        fields.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *fields]})
    if unread is not None and status == _TOO_LARGE:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _linger(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: WireError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """An error that belongs to no family."""
    await send_bytes(send, error.status, error_body(error), headers=headers)
