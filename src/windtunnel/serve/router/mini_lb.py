"""Pairs as SGLang's `mini_lb` makes them (reference §2.4, clients §3).

The same body goes to one prefill and one decode at the same time, and the client gets the decode's answer. A prefill's error
status is ignored. A streamed answer always has status 200, whatever the decode's was. A client that leaves a stream takes both
legs along; one that leaves while it waits for a whole answer is not noticed, and both legs run on.
"""

import json
import logging
import random
import secrets
from contextlib import AsyncExitStack
from typing import Any

import httpx

from windtunnel.serve.asgi import Receive, Scope, Send, send_bytes
from windtunnel.serve.router.config import RouterConfig
from windtunnel.serve.router.proxy import NO_OBJECT, Proxy, both, complain, object_of, pass_on, until_gone
from windtunnel.wire.sglang.pairing import PrefillAddress, with_bootstrap

log = logging.getLogger("windtunnel.router")


class MiniLb:
    paths = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})

    def __init__(self, config: RouterConfig, proxy: Proxy) -> None:
        self._config = config
        self._proxy = proxy

    async def route(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        body = object_of(raw)
        if body is None:
            await complain(send, 400, NO_OBJECT)
            return
        prefill, decode = random.choice(self._config.prefills), random.choice(self._config.decodes)
        told = json.dumps(with_bootstrap(body, prefill, secrets.randbelow)).encode()
        if body.get("stream"):
            await until_gone(self._stream(scope, told, prefill, decode, send), receive)
        else:
            await self._whole(scope, told, prefill, decode, send)

    async def _whole(self, scope: Scope, raw: bytes, prefill: PrefillAddress, decode: str, send: Send) -> None:
        try:
            _ignored, answer = await both([self._proxy.whole(url, scope, raw) for url in (prefill.url, decode)])
        except httpx.HTTPError as error:
            await complain(send, 502, f"{type(error).__name__} {error}")
            return
        await send_bytes(send, answer.status_code, answer.content, answer.headers.get("content-type", "").encode() or None)

    async def _stream(self, scope: Scope, raw: bytes, prefill: PrefillAddress, decode: str, send: Send) -> None:
        started = False
        try:
            async with AsyncExitStack() as legs:
                entering: list[Any] = [
                    legs.enter_async_context(self._proxy.leg(url, scope, raw)) for url in (prefill.url, decode)
                ]
                _ignored, answer = await both(entering)
                head = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
                started = True
                await pass_on(answer.aiter_raw(), send)
        except httpx.HTTPError as error:
            log.warning("%s or %s: %s %s", prefill.url, decode, type(error).__name__, error)
            if not started:
                await complain(send, 502, f"{type(error).__name__} {error}")
