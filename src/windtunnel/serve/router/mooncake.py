"""vLLM pairs with Mooncake, as vLLM's example proxy makes them (`mooncake_connector_proxy.py` of 0.33.0, read and not run).

Both legs leave at once, under one transfer id. The prefill's leg belongs to nobody: what it answers is not looked at, and a
client that leaves does not end it; the decode's leg ends with its client. Prefills take turns, each with all its data-parallel
ranks, whose engine ids its bootstrap server has told.

Different from there: legs of prefills have a limit, the server is asked when it is needed and again after `AGAIN_S` (there at
the start), a decode's error status is passed on (there the answer has begun as a 200), and messages, responses and tokens in
are paired as well.
"""

import asyncio
import itertools
import json
import logging
import os
import uuid
from typing import Any, NamedTuple

import httpx

from windtunnel.serve.asgi import Receive, Scope, Send
from windtunnel.serve.pd.http_client import NoAnswer, ask
from windtunnel.serve.router.config import RouterConfig
from windtunnel.serve.router.proxy import NO_OBJECT, Headers, Proxy, complain, object_of, pass_on, start, until_gone
from windtunnel.wire.sglang.pairing import PrefillAddress
from windtunnel.wire.vllm import pairing
from windtunnel.wire.vllm.mooncake import MooncakeError, engine_ids

log = logging.getLogger("windtunnel.router")

BOOTSTRAP_PORT = 8998
AGAIN_S = 10.0
"""So long counts what a bootstrap server has said. Then it is asked beside the next request; a bad answer changes nothing."""
_PATIENCE = httpx.Timeout(30.0)


class _Known(NamedTuple):
    engine_ids: dict[int, str]
    """By data-parallel rank; at most `core.vllm.connector.params.MAX_RANKS`."""
    until_s: float
    """On the loop's clock."""


class Mooncake:
    paths = pairing.PATHS

    def __init__(self, config: RouterConfig, proxy: Proxy) -> None:
        self._proxy = proxy
        self._prefills = config.prefills
        self._known: dict[str, _Known] = {}
        """Of each prefill that was configured, by its URL."""
        self._asking: set[asyncio.Task[None]] = set()
        self._turn = itertools.count()
        self._decodes = itertools.cycle(config.decodes)
        self._prefilling: set[asyncio.Task[None]] = set()
        self._legs_limit = config.connections

    async def route(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        body = object_of(raw)
        if body is None:
            await complain(send, 400, NO_OBJECT)
            return
        await until_gone(self._pair(scope, body, send), receive)

    async def _pair(self, scope: Scope, body: dict[str, Any], send: Send) -> None:
        try:
            prefill, rank, engine_id = await self._next_prefill()
        except (NoAnswer, MooncakeError) as error:
            await complain(send, 503, f"a prefill's bootstrap server: {type(error).__name__} {error}")
            return
        if len(self._prefilling) >= self._legs_limit:
            await complain(send, 503, f"{self._legs_limit} prefills are under way already")
            return
        request_id = str(uuid.uuid4())
        headers = [
            ("authorization", f"Bearer {os.environ.get('OPENAI_API_KEY')}"),
            ("content-type", "application/json"),
            (pairing.REQUEST_ID_HEADER, request_id),
        ]
        to_prefill, to_decode = pairing.mooncake_bodies(
            scope["path"], body, f"xfer-{request_id}", bootstrap_address(prefill), engine_id
        )
        leg = asyncio.ensure_future(self._prefill(prefill, scope, to_prefill, [*headers, ("x-data-parallel-rank", str(rank))]))
        self._prefilling.add(leg)
        leg.add_done_callback(self._prefilling.discard)
        await self._decode(next(self._decodes), scope, to_decode, headers, send)

    async def _next_prefill(self) -> tuple[PrefillAddress, int, str]:
        """The next rank of the next prefill. Raises NoAnswer, MooncakeError."""
        places = [
            (prefill, rank, engine_id)
            for prefill in self._prefills
            for rank, engine_id in sorted((await self._engines_of(prefill)).items())
        ]
        return places[next(self._turn) % len(places)]

    async def _engines_of(self, prefill: PrefillAddress) -> dict[int, str]:
        known, at_s = self._known.get(prefill.url), asyncio.get_running_loop().time()
        if known is None:
            return await self._ask(prefill)
        if at_s >= known.until_s:
            self._known[prefill.url] = known._replace(until_s=at_s + AGAIN_S)
            asking = asyncio.ensure_future(self._ask_again(prefill))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        return known.engine_ids

    async def _ask(self, prefill: PrefillAddress) -> dict[int, str]:
        """Raises NoAnswer, MooncakeError."""
        found = engine_ids(await ask(self._proxy.client, "GET", f"{bootstrap_address(prefill)}/query", _PATIENCE))
        self._known[prefill.url] = _Known(found, asyncio.get_running_loop().time() + AGAIN_S)
        return found

    async def _ask_again(self, prefill: PrefillAddress) -> None:
        try:
            await self._ask(prefill)
        except (NoAnswer, MooncakeError) as error:
            log.warning("a prefill's bootstrap server: %s", error)

    async def _prefill(self, prefill: PrefillAddress, scope: Scope, body: dict[str, Any], headers: Headers) -> None:
        try:
            answer = await self._proxy.whole(prefill.url, scope, json.dumps(body).encode(), headers)
        except httpx.HTTPError as error:
            log.warning("%s: %s %s", prefill.url, type(error).__name__, error)
            return
        if answer.status_code != 200:
            log.warning("%s: status %d", prefill.url, answer.status_code)

    async def _decode(self, decode: str, scope: Scope, body: dict[str, Any], headers: Headers, send: Send) -> None:
        started = False
        try:
            async with self._proxy.leg(decode, scope, json.dumps(body).encode(), headers) as answer:
                await start(send, answer)
                started = True
                await pass_on(answer.aiter_raw(), send)
        except httpx.HTTPError as error:
            if started:
                raise
            await complain(send, 502, f"{decode}: {type(error).__name__} {error}")


def bootstrap_address(prefill: PrefillAddress) -> str:
    host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
    return f"http://{host}:{prefill.bootstrap_port or BOOTSTRAP_PORT}"
