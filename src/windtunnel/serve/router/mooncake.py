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
from typing import Any

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
"""Between two questions to a bootstrap server, which are asked beside a request; a bad answer changes nothing."""
_PATIENCE = httpx.Timeout(30.0)


class Mooncake:
    paths = pairing.PATHS

    def __init__(self, config: RouterConfig, proxy: Proxy) -> None:
        self._proxy = proxy
        self._prefills = config.prefills
        self._known: dict[str, dict[int, str]] = {}
        """Of each prefill whose bootstrap server has answered, by its URL: engine ids by data-parallel rank (at most
        `core.vllm.connector.params.MAX_RANKS`)."""
        self._asking: dict[str, asyncio.Task[NoAnswer | MooncakeError | None]] = {}
        """Why a server has not answered; by the prefill's URL, one question at a time."""
        self._next_s: dict[str, float] = {}
        """When a server is asked again, on the loop's clock."""
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
        leg = self._proxy.spawn(self._prefill(prefill, scope, to_prefill, [*headers, ("x-data-parallel-rank", str(rank))]))
        self._prefilling.add(leg)
        leg.add_done_callback(self._prefilling.discard)
        await self._decode(next(self._decodes), scope, to_decode, headers, send)

    async def _next_prefill(self) -> tuple[PrefillAddress, int, str]:
        """The next rank of those prefills whose bootstrap servers have answered. Raises NoAnswer, MooncakeError."""
        for prefill in self._prefills:
            self._look(prefill)
        if not self._known:
            await self._first_answer()
        places = [
            (prefill, rank, engine_id)
            for prefill in self._prefills
            for rank, engine_id in sorted(self._known.get(prefill.url, {}).items())
        ]
        return places[next(self._turn) % len(places)]

    def _look(self, prefill: PrefillAddress) -> None:
        """Ask its server if that is due, or nobody has answered yet."""
        due = not self._known or asyncio.get_running_loop().time() >= self._next_s.get(prefill.url, 0.0)
        if due and prefill.url not in self._asking:
            self._asking[prefill.url] = self._proxy.spawn(self._ask(prefill))

    async def _first_answer(self) -> None:
        asking = set(self._asking.values())
        while True:
            ended, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            if self._known:
                return
            if not asking:
                raise next(error for task in ended if (error := task.result()) is not None)

    async def _ask(self, prefill: PrefillAddress) -> NoAnswer | MooncakeError | None:
        try:
            told = await ask(self._proxy.client, "GET", f"{bootstrap_address(prefill)}/query", _PATIENCE)
            self._known[prefill.url] = engine_ids(told)
        except (NoAnswer, MooncakeError) as error:
            log.warning("a prefill's bootstrap server: %s", error)
            return error
        finally:
            del self._asking[prefill.url]
            self._next_s[prefill.url] = asyncio.get_running_loop().time() + AGAIN_S
        return None

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
