"""What stands around the routes of an SGLang server: HTTP metrics and API keys."""

import hmac
import logging
from collections.abc import MutableMapping
from typing import Any

from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, headers_of, send_bytes, send_error
from windtunnel.wire.family import WireError
from windtunnel.wire.http import unauthorized
from windtunnel.wire.sglang.errors import flat_body
from windtunnel.wire.sglang.metrics import SglangMetrics

log = logging.getLogger("windtunnel.serve")

OPEN_PREFIXES = ("/health", "/metrics", "/ready", "/ping")


class SglangHttp:
    """`sglang:http_*`: requests as they come, responses as their head leaves (SGLang reference §6.3)."""

    def __init__(self, app: Endpoint, metrics: SglangMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, endpoint, method = self._metrics, scope["path"], scope["method"]
        started = False

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                metrics.on_http_status(endpoint, method, message["status"])
            await send(message)

        metrics.on_http_begin(endpoint, method)
        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            log.exception("a request failed inside the server")
            if started:
                raise
            error = WireError("Internal server error", 500, "InternalServerError")
            await send_bytes(watched_send, 500, flat_body(error))
        finally:
            metrics.on_http_end(endpoint, method)


class SglangKeys:
    """The API key on everything but health and metrics; on the operator's routes the admin key where there is one (§7.1)."""

    def __init__(self, app: Endpoint, keys: tuple[str, ...], admin_key: str | None, admin_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [_bearer(key) for key in keys]
        self._admin = None if admin_key is None else [_bearer(admin_key)]
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._allowed(scope):
            await send_error(send, unauthorized())
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path.startswith(OPEN_PREFIXES):
            return True
        keys = self._admin if self._admin is not None and path in self._admin_paths else self._keys
        given = headers_of(scope).get("authorization", "").encode("latin-1")
        return not keys or any(hmac.compare_digest(given, key) for key in keys)


def _bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()
