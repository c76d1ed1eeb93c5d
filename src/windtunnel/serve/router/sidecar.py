"""Pairs as the llm-d sidecar makes them (vLLM reference §7.4): first the prefill, then the decode with what it answered.

Both legs run under the client's life. A client that leaves during a leg takes that leg along. One that leaves after the prefill
has finished and before the decode request is sent is the end of the request, and nobody tells the prefill: its blocks stay for
the whole lease. With `decode_after_departure` the decode request is sent all the same, and dropped with its first token (what
Dynamo does: only a decode can release the prefill).
"""

import asyncio
import itertools
import json
import logging
import random
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from windtunnel.serve.asgi import JSON, ClientGone, Receive, Scope, Send, send_bytes
from windtunnel.serve.router.config import RouterConfig, SidecarConfig
from windtunnel.serve.router.proxy import Client, Headers, Proxy, all_headers, answer_headers, pass_on, start
from windtunnel.wire.vllm import pairing

log = logging.getLogger("windtunnel.router")

_TEXT = b"text/plain; charset=utf-8"
_FORBIDDEN = b"Forbidden: prefill target not allowed by SSRF protection\n"
_NOT_READY = (
    "The decode node is not ready. Please check that the vLLM service is running and the port configuration is correct."
)
_HEADER = pairing.PREFILL_HEADER.encode()
_RETRIED = (502, 503, 504)
_SSE = "text/event-stream"


class OwnError(Exception):
    """An answer of the sidecar itself."""

    def __init__(self, kind: str, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = pairing.own_error(kind, status, message)


class Passed(Exception):
    """The prefill's answer is the client's."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.status_code)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Asked:
    """One request on its way through both legs."""

    scope: Scope
    body: dict[str, Any]
    headers: Headers
    prefill: str
    decode: str

    @property
    def path(self) -> str:
        return str(self.scope["path"])


class Sidecar:
    paths = pairing.PATHS

    def __init__(self, settings: SidecarConfig, config: RouterConfig, proxy: Proxy) -> None:
        self._settings = settings
        self._proxy = proxy
        self._allowed = {urlsplit(one.url).netloc: one.url for one in config.prefills}
        self._prefills = itertools.cycle([one.url for one in config.prefills])
        self._decodes = itertools.cycle(config.decodes)

    async def route(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        try:
            prefill = self._prefill_of(scope)
        except KeyError as denied:
            log.error("the prefill %s is not in the allow-list", denied)
            await send_bytes(send, 403, _FORBIDDEN, _TEXT)
            return
        async with Client(receive) as client:
            try:
                await self._pair(client, scope, raw, prefill, send)
            except OwnError as error:
                await send_bytes(send, error.status, error.body, JSON)
            except Passed as passed:
                answer = passed.answer
                await send({"type": "http.response.start", "status": answer.status_code, "headers": answer_headers(answer)})
                await send({"type": "http.response.body", "body": answer.content})

    def _prefill_of(self, scope: Scope) -> str | None:
        """From the header, which may come several times or have commas, or else the next in turn; None: no prefill.

        Raises KeyError for one that is not allowed.
        """
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER]
        named = [one.strip() for one in (lines[0].split(",") if len(lines) == 1 else lines or [""])]
        chosen = random.choice(named) if self._settings.sampling else named[0]
        if chosen:
            return self._allowed[chosen]
        return None if self._settings.header_only else next(self._prefills)

    async def _pair(self, client: Client, scope: Scope, raw: bytes, prefill: str | None, send: Send) -> None:
        headers = all_headers(scope, {pairing.PREFILL_HEADER, "accept-encoding"})
        headers.append(("accept-encoding", "identity"))
        decode = next(self._decodes)
        if prefill is None:
            await client.during(self._decode_as_it_is(decode, scope, raw, headers, send))
            return
        headers.append((pairing.REQUEST_ID_HEADER, str(uuid.uuid1())))
        asked = Asked(scope, _object(raw), headers, prefill, decode)
        answer = await client.during(self._prefill(asked))
        told = pairing.decode_body(asked.body, answer)
        try:
            await client.during(asyncio.sleep(self._settings.between_legs_s))
        except ClientGone:
            if self._settings.decode_after_departure:
                await self._release(asked, told)
            raise
        await client.during(self._decode(asked, told, pairing.cached_tokens(answer), send))

    # The prefill

    async def _prefill(self, asked: Asked) -> dict[str, Any]:
        """The prefill's answer. Raises Passed for one that the client gets, OwnError."""
        raw = json.dumps(pairing.prefill_body(asked.path, asked.body)).encode()
        for attempt in itertools.count():
            answer = await self._prefill_once(asked, raw)
            if answer.status_code not in _RETRIED or attempt >= self._settings.retries:
                break
            log.info("prefill %s: status %d, attempt %d", asked.prefill, answer.status_code, attempt + 1)
            await asyncio.sleep(self._settings.retry_backoff_s)
        if not 200 <= answer.status_code < 300:
            raise Passed(answer)
        told = _object(answer.content)
        if "kv_transfer_params" not in told:
            log.info("missing 'kv_transfer_params' field in prefiller response")
        return told

    async def _prefill_once(self, asked: Asked, raw: bytes) -> httpx.Response:
        """A prefill that cannot be reached is a 502."""
        try:
            return await self._proxy.whole(asked.prefill, asked.scope, raw, asked.headers)
        except httpx.HTTPError as error:
            text = pairing.own_error("BadGateway", 502, f"{asked.prefill}: {type(error).__name__} {error}")
            return httpx.Response(502, content=text, headers={"content-type": JSON.decode()})

    # The decode

    async def _decode_as_it_is(self, decode: str, scope: Scope, raw: bytes, headers: Headers, send: Send) -> None:
        try:
            async with self._proxy.leg(decode, scope, raw, headers) as answer:
                await start(send, answer)
                await pass_on(answer.aiter_raw(), send)
        except httpx.HTTPError as error:
            raise _no_decode(decode, error) from error

    async def _decode(self, asked: Asked, told: dict[str, Any], cached: int, send: Send) -> None:
        raw = json.dumps(told).encode()
        counts = pairing.CachedTokens(asked.path, cached)
        started = False
        try:
            async with self._proxy.leg(asked.decode, asked.scope, raw, asked.headers) as answer:
                streamed = _SSE in answer.headers.get("content-type", "")
                whole = b"" if streamed else counts.whole(await answer.aread())
                await start(send, answer)
                started = True
                await pass_on(_rewritten(answer, counts) if streamed else _one(whole), send)
        except httpx.HTTPError as error:
            if started:
                raise
            raise _no_decode(asked.decode, error) from error

    async def _release(self, asked: Asked, told: dict[str, Any]) -> None:
        """The client has gone: a decode all the same, as a stream, whose first token ends it."""
        raw = json.dumps({**told, "stream": True}).encode()
        try:
            async with self._proxy.leg(asked.decode, asked.scope, raw, asked.headers) as answer:
                async for _first in answer.aiter_raw():
                    break
        except httpx.HTTPError as error:
            log.warning("%s: the prefill was not released: %s %s", asked.decode, type(error).__name__, error)


async def _rewritten(answer: httpx.Response, counts: pairing.CachedTokens) -> AsyncIterator[bytes]:
    async for piece in answer.aiter_raw():
        if part := counts.part(piece):
            yield part
    if rest := counts.end():
        yield rest


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _object(raw: bytes) -> dict[str, Any]:
    """Raises OwnError."""
    try:
        told = json.loads(raw)
    except ValueError as error:
        raise OwnError("BadRequestError", 400, str(error)) from None
    if not isinstance(told, dict):
        raise OwnError("BadRequestError", 400, f"the body must be a JSON object, not {type(told).__name__}")
    return told


def _no_decode(url: str, error: httpx.HTTPError) -> OwnError:
    if isinstance(error, httpx.ConnectError):
        return OwnError("ServiceUnavailable", 503, _NOT_READY)
    return OwnError("BadGateway", 502, f"{url}: {type(error).__name__} {error}")
