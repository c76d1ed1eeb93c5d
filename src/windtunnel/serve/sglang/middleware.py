"""What stands around the routes of an SGLang server: HTTP metrics and API keys."""

from collections.abc import MutableMapping
from typing import Any

from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, headers_of, send_bytes
from windtunnel.serve.middleware import INTERNAL, ApiKeys, bearers, bears_one, guarded
from windtunnel.wire.sglang.errors import flat_body
from windtunnel.wire.sglang.metrics import SglangMetrics

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
        routing_key = headers_of(scope).get("x-smg-routing-key")

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                metrics.on_http_status(endpoint, method, message["status"])
            await send(message)

        metrics.on_http_begin(endpoint, method, routing_key)
        try:
            await guarded(self._app, scope, receive, watched_send, _fail)
        finally:
            metrics.on_http_end(endpoint, method, routing_key)


async def _fail(send: Send) -> None:
    await send_bytes(send, INTERNAL.status, flat_body(INTERNAL))


class SglangKeys(ApiKeys):
    """The API key on everything but health and metrics; on the operator's routes the admin key where there is one (§7.1)."""

    def __init__(self, app: Endpoint, keys: tuple[str, ...], admin_key: str | None, admin_paths: frozenset[str]) -> None:
        super().__init__(app, keys)
        self._admin = None if admin_key is None else bearers([admin_key])
        self._admin_paths = admin_paths

    def allowed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path.startswith(OPEN_PREFIXES):
            return True
        keys = self._admin if self._admin is not None and path in self._admin_paths else self._keys
        return bears_one(scope, keys)
