"""Pure ASGI middleware, in the order of vLLM's own stack. Nothing here sees the frames of a stream."""

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, headers_of, send_error
from windtunnel.serve.telemetry import Metrics
from windtunnel.wire.family import WireError
from windtunnel.wire.http import unauthorized

log = logging.getLogger("windtunnel.serve")

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


class ApiKeys:
    """401 on the guarded paths without one of the keys (vLLM reference §1.6). No keys: everything is open."""

    def __init__(self, app: Endpoint, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = bearers(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self.allowed(scope):
            await send_error(send, unauthorized())
        else:
            await self._app(scope, receive, send)

    def allowed(self, scope: Scope) -> bool:
        return not scope["path"].startswith(_GUARDED) or bears_one(scope, self._keys)


def bearers(keys: Sequence[str]) -> list[bytes]:
    return [f"Bearer {key}".encode() for key in keys]


def bears_one(scope: Scope, keys: Sequence[bytes]) -> bool:
    """Whether the request has one of the keys, or there are none."""
    if not keys:
        return True
    given = headers_of(scope).get("authorization", "").encode("latin-1")
    return any(hmac.compare_digest(given, key) for key in keys)


class RequestIds:
    """`--enable-request-id-headers`: echo or invent X-Request-Id."""

    def __init__(self, app: Endpoint) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = headers_of(scope).get("x-request-id") or uuid.uuid4().hex
        await self._app(scope, receive, _with_headers(send, [(b"x-request-id", request_id.encode("latin-1"))]))


class PodHeaders:
    """`x-inference-pod`, `-port` and `-namespace` on answers below /v1 and /inference, as llm-d-inference-sim gives them."""

    def __init__(self, app: Endpoint, name: str | None, namespace: str | None, port: int) -> None:
        self._app = app
        told = {b"x-inference-pod": name, b"x-inference-port": str(port) if name else None, b"x-inference-namespace": namespace}
        self._headers = [(key, value.encode("latin-1", "replace")) for key, value in told.items() if value]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = scope["type"] == "http" and scope["path"].startswith(_GUARDED)
        await self._app(scope, receive, _with_headers(send, self._headers) if told else send)


def _with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sending


INTERNAL = WireError("Internal server error", 500, "InternalServerError")


async def guarded(app: Endpoint, scope: Scope, receive: Receive, send: Send, fail: Callable[[Send], Awaitable[None]]) -> None:
    """Log what the app raises. Before the head `fail` answers in its place; after it nobody can."""
    started = False

    async def watched(message: MutableMapping[str, Any]) -> None:
        nonlocal started
        started = started or message["type"] == "http.response.start"
        await send(message)

    try:
        await app(scope, receive, watched)
    except Exception:
        log.exception("a request failed inside the server")
        if started:
            raise
        await fail(send)


class HttpMetrics:
    """The `http_*` families (§4.5). A client that left counts as 2xx; unknown paths count under handler "none"."""

    def __init__(self, app: Endpoint, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, size = 200, 0

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                size = int(dict(message["headers"]).get(b"content-length", 0))
            await send(message)

        try:
            await guarded(self._app, scope, receive, watched_send, partial(send_error, error=INTERNAL))
        finally:
            request_bytes = int(headers_of(scope).get("content-length", "0") or 0)
            handler = scope.get("windtunnel.handler", "none")
            self._metrics.on_http(handler, scope["method"], status, time.perf_counter() - started_s, request_bytes, size)
