"""The router as an ASGI application: pairs of a prefill and a decode (`mini_lb`, `sidecar`, `mooncake`), and plain workers.

A plain leg is passed through as it is, and so is a client's leaving.
"""

import asyncio
import itertools
import logging
from typing import Protocol

import httpx

from windtunnel.serve import asgi
from windtunnel.serve.asgi import Receive, Scope, Send, send_bytes
from windtunnel.serve.router.config import RouterConfig
from windtunnel.serve.router.mini_lb import MiniLb
from windtunnel.serve.router.mooncake import Mooncake
from windtunnel.serve.router.proxy import Proxy, complain, pass_on, start, until_gone
from windtunnel.serve.router.sidecar import Sidecar

log = logging.getLogger("windtunnel.router")

_BODY_TIMEOUT_S = 60.0
_TO_ALL = frozenset({"/flush_cache", "/health_generate"})


class Pairs(Protocol):
    """How a request is served by a prefill and a decode together."""

    paths: frozenset[str]
    """POST to one of these makes a pair."""

    async def route(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        """Raises ClientGone."""
        ...


class RouterApp:
    """Owns the connections to the workers."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._proxy = Proxy(config.request_timeout_s, config.connections)
        self._pairs: Pairs | None = None
        if config.pd:
            self._pairs = MiniLb(config, self._proxy)
        elif config.mooncake:
            self._pairs = Mooncake(config, self._proxy)
        elif config.sidecar is not None:
            self._pairs = Sidecar(config.sidecar, config, self._proxy)
        plain = config.decodes if config.paired else config.workers
        self.urls = (*(one.url for one in config.prefills), *plain)
        self._rounds = itertools.cycle(plain)

    async def close(self) -> None:
        await self._proxy.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            if path == "/health":
                await send_bytes(send, 200, b"", None)
            elif path in _TO_ALL:
                await self._to_all(scope, send)
            else:
                await self._route(scope, receive, send)
        except asgi.ClientGone:
            return
        except (asgi.BodyTooLarge, asgi.BodyTimeout) as error:
            status = 413 if isinstance(error, asgi.BodyTooLarge) else 408
            await complain(send, status, f"the body is over {self._config.body_bytes} bytes or did not come in time")

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await asgi.read_body(receive, self._config.body_bytes, _BODY_TIMEOUT_S)
        if self._pairs is not None and scope["path"] in self._pairs.paths and scope["method"] in ("POST", "PUT"):
            await self._pairs.route(scope, raw, receive, send)
        else:
            await until_gone(self._plain(scope, raw, send), receive)

    async def _plain(self, scope: Scope, raw: bytes, send: Send) -> None:
        url = next(self._rounds)
        try:
            async with self._proxy.leg(url, scope, raw) as answer:
                await start(send, answer)
                await pass_on(answer.aiter_raw(), send)
        except httpx.HTTPError as error:
            await complain(send, 502, f"{url}: {type(error).__name__} {error}")

    async def _to_all(self, scope: Scope, send: Send) -> None:
        """The worst status of all workers."""
        statuses = await asyncio.gather(*(self._status(url, scope) for url in self.urls))
        await send_bytes(send, max(statuses), b"", None)

    async def _status(self, url: str, scope: Scope) -> int:
        try:
            return (await self._proxy.whole(url, scope, b"")).status_code
        except httpx.HTTPError:
            return 503
