"""The router as an ASGI application.

With prefills and decodes it does what SGLang's `mini_lb` does (reference §2.4, clients §3): the same body goes to one prefill
and one decode at the same time, and the client gets the decode's answer. A prefill's error status is ignored. A streamed answer
always has status 200, whatever the decode's was. A client that leaves a stream takes both legs along; one that leaves
while it waits for a whole answer is not noticed, and both legs run on.

With plain workers it goes round, and passes every disconnect on.
"""

import asyncio
import itertools
import json
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx

from windtunnel.serve import asgi
from windtunnel.serve.asgi import Receive, Scope, Send, headers_of, send_bytes
from windtunnel.serve.router.config import RouterConfig
from windtunnel.wire.sglang.pairing import PrefillAddress, with_bootstrap

log = logging.getLogger("windtunnel.router")

_PASSED_ON = ("authorization", "content-type", "traceparent", "x-request-id", "accept")
_CONNECT_S = 5.0
_BODY_TIMEOUT_S = 60.0
_HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "server", "date", "transfer-encoding"})
_GONE = "http.disconnect"
_GENERATING = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_TO_ALL = frozenset({"/flush_cache", "/health_generate"})


class RouterApp:
    """Owns the connections to the workers."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(config.request_timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=2 * config.connections, max_keepalive_connections=0),
        )
        urls = [one.url for one in config.prefills] + list(config.decodes) if config.pd else list(config.workers)
        self.urls = tuple(urls)
        self._rounds = itertools.cycle(config.decodes if config.pd else config.workers)

    async def close(self) -> None:
        await self._client.aclose()

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
            await _complain(send, status, f"the body is over {self._config.body_bytes} bytes or did not come in time")

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await asgi.read_body(receive, self._config.body_bytes, _BODY_TIMEOUT_S)
        if not (self._config.pd and scope["path"] in _GENERATING and scope["method"] in ("POST", "PUT")):
            await until_gone(self._plain(scope, raw, send), receive)
            return
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise TypeError
        except (ValueError, TypeError):
            await _complain(send, 400, "the body must be a JSON object")
            return
        prefill, decode = random.choice(self._config.prefills), random.choice(self._config.decodes)
        if body.get("stream"):
            await until_gone(self._stream_pair(scope, body, prefill, decode, send), receive)
        else:
            await self._whole_pair(scope, body, prefill, decode, send)

    # Plain

    async def _plain(self, scope: Scope, raw: bytes, send: Send) -> None:
        url = next(self._rounds)
        try:
            async with self._leg(url, scope, raw) as answer:
                await send({"type": "http.response.start", "status": answer.status_code, "headers": _headers(answer)})
                await _pass_on(answer, send)
        except httpx.HTTPError as error:
            await _complain(send, 502, f"{url}: {type(error).__name__} {error}")

    async def _to_all(self, scope: Scope, send: Send) -> None:
        """The worst status of all workers."""
        statuses = await asyncio.gather(*(self._status(url, scope) for url in self.urls))
        await send_bytes(send, max(statuses), b"", None)

    async def _status(self, url: str, scope: Scope) -> int:
        try:
            return (await self._client.request(scope["method"], url + scope["path"])).status_code
        except httpx.HTTPError:
            return 503

    # Pairs

    def _bodies(self, body: dict[str, Any], prefill: PrefillAddress) -> bytes:
        return json.dumps(with_bootstrap(body, prefill, secrets.randbelow)).encode()

    async def _whole_pair(self, scope: Scope, body: dict[str, Any], prefill: PrefillAddress, decode: str, send: Send) -> None:
        raw = self._bodies(body, prefill)
        try:
            _ignored, answer = await asyncio.gather(*(self._whole(url, scope, raw) for url in (prefill.url, decode)))
        except httpx.HTTPError as error:
            await _complain(send, 502, f"{type(error).__name__} {error}")
            return
        await send_bytes(send, answer.status_code, answer.content, answer.headers.get("content-type", "").encode() or None)

    async def _whole(self, url: str, scope: Scope, raw: bytes) -> httpx.Response:
        return await self._client.post(url + scope["path"], content=raw, headers=_passed_on(scope))

    async def _stream_pair(self, scope: Scope, body: dict[str, Any], prefill: PrefillAddress, decode: str, send: Send) -> None:
        raw = self._bodies(body, prefill)
        started = False
        try:
            async with AsyncExitStack() as legs:
                entering = [legs.enter_async_context(self._leg(url, scope, raw)) for url in (prefill.url, decode)]
                _ignored, answer = await _both(entering)
                head = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
                started = True
                await _pass_on(answer, send)
        except httpx.HTTPError as error:
            log.warning("%s or %s: %s %s", prefill.url, decode, type(error).__name__, error)
            if not started:
                await _complain(send, 502, f"{type(error).__name__} {error}")

    @asynccontextmanager
    async def _leg(self, url: str, scope: Scope, raw: bytes) -> AsyncIterator[httpx.Response]:
        query = scope.get("query_string", b"").decode("latin-1")
        target = url + scope["path"] + (f"?{query}" if query else "")
        request = self._client.build_request(scope["method"], target, content=raw, headers=_passed_on(scope))
        answer = await self._client.send(request, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()


async def _both(entering: Iterable[Awaitable[httpx.Response]]) -> list[httpx.Response]:
    """Both heads; when one leg fails the other is given up."""
    tasks = [asyncio.ensure_future(one) for one in entering]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def until_gone(work: Awaitable[None], receive: Receive) -> None:
    """Run `work`; a client that leaves cancels it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    with suppress(asyncio.CancelledError):
        await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != _GONE:
        """Nothing else can come after the body."""


async def _pass_on(answer: httpx.Response, send: Send) -> None:
    async for part in answer.aiter_raw():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _passed_on(scope: Scope) -> dict[str, str]:
    headers = headers_of(scope)
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def _headers(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in answer.headers.raw if name.decode("latin-1").lower() not in _HOP_BY_HOP]


async def _complain(send: Send, status: int, message: str) -> None:
    body = {"error": {"message": message, "type": "router_error", "param": None, "code": status}}
    await send_bytes(send, status, json.dumps(body).encode())
