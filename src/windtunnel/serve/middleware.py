"""Pure ASGI middleware, in the order of vLLM's own stack. Nothing here sees the frames of a stream."""

import hmac
import logging
import time
import uuid
from collections.abc import MutableMapping, Sequence
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
        self._keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(_GUARDED):
            given = headers_of(scope).get("authorization", "").encode("latin-1")
            if not any(hmac.compare_digest(given, key) for key in self._keys):
                await send_error(send, unauthorized())
                return
        await self._app(scope, receive, send)


class RequestIds:
    """`--enable-request-id-headers`: echo or invent X-Request-Id."""

    def __init__(self, app: Endpoint) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = headers_of(scope).get("x-request-id") or uuid.uuid4().hex

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class PodHeaders:
    """`x-inference-pod`, `-port` and `-namespace` on answers below /v1 and /inference, as llm-d-inference-sim gives them."""

    def __init__(self, app: Endpoint, name: str | None, namespace: str | None, port: int) -> None:
        self._app = app
        told = {b"x-inference-pod": name, b"x-inference-port": str(port) if name else None, b"x-inference-namespace": namespace}
        self._headers = [(key, value.encode("latin-1", "replace")) for key, value in told.items() if value]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_GUARDED):
            await self._app(scope, receive, send)
            return

        async def send_with_pod(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_pod)


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
        status, size, started = 200, 0, False

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, size, started
            if message["type"] == "http.response.start":
                started = True
                status = message["status"]
                size = int(dict(message["headers"]).get(b"content-length", 0))
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            log.exception("a request failed inside the server")
            if started:
                raise
            await send_error(watched_send, WireError("Internal server error", 500, "InternalServerError"))
        finally:
            request_bytes = int(headers_of(scope).get("content-length", "0") or 0)
            handler = scope.get("windtunnel.handler", "none")
            self._metrics.on_http(handler, scope["method"], status, time.perf_counter() - started_s, request_bytes, size)
