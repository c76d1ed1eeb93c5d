"""A prefill, a decode and the balancer between them, in the test's own event loop, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, RawClient, live, request_bytes
from tests.serve.router.fake_worker import router

from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.serve.clock import now_ns
from windtunnel.serve.router.config import SidecarConfig
from windtunnel.wire.sglang.pairing import PrefillAddress

MODEL = "wt-model"
PROMPT = "[wt:a1] " + "prefill and then decode " * 30
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
AS_IT_IS: dict[str, Any] = {}
HELD: dict[str, Any] = {"kv_transfer__transfer_latency_ns": FOREVER_NS}
"""Whoever moves blocks moves them for ever, or until `land`."""


@dataclass
class Pair:
    p: LiveServer
    d: LiveServer
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return await self.client.post(self.url + path, json=body, **more)

    async def prefilled(self, body: dict[str, Any] = COMPLETION) -> dict[str, Any]:
        """The prefill leg alone: what the decode is to be told."""
        told = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        answer = await self.client.post(f"{self.p.url}/v1/completions", json=told)
        params = answer.json()["kv_transfer_params"]
        assert isinstance(params, dict), answer.text
        return params

    async def decoding(self, params: dict[str, Any], *, stream: bool = True) -> RawClient:
        """A client of the decode leg alone."""
        client = await RawClient.connect(self.d.port)
        client.send(request_bytes("/v1/completions", COMPLETION | {"stream": stream, "kv_transfer_params": params}))
        return client

    async def until_idle(self) -> None:
        """Both at rest: nothing runs, is held or is under way, and the books add up."""
        await until(lambda: at_rest(self.p) and at_rest(self.d))
        for server in (self.p, self.d):
            server.server.engine.check_integrity()
            pool = engine_of(server)._scheduler.pool
            assert pool.free_blocks == pool.usable_blocks


def engine_of(server: LiveServer) -> ConnectorEngine:
    engine = server.server.engine
    assert isinstance(engine, ConnectorEngine)
    return engine


def counters(server: LiveServer) -> dict[str, int]:
    """Those that are not 0, without their prefix."""
    return {name.removeprefix("nixl_num_"): value for name, value in engine_of(server).connector.counters.items() if value}


def holds(server: LiveServer) -> int:
    return engine_of(server).outstanding()["holds"]


def moving(server: LiveServer) -> int:
    """How many moves of blocks this server has under way."""
    return len(_connection(server).transport._mover)


def land(server: LiveServer) -> None:
    """They end."""
    transport = _connection(server).transport
    backend = transport._mover.backend
    for number in backend._handles:
        backend._schedule(number, now_ns())
    transport._set_alarm()


def _connection(server: LiveServer) -> Any:
    flavour: Any = server.server.flavour
    (connection,) = flavour._connections
    return connection


def at_rest(server: LiveServer) -> bool:
    return not server.server.engine.live() and not any(engine_of(server).outstanding().values()) and not len(server.server.jobs)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def pair(
    both: dict[str, Any] = AS_IT_IS, p: dict[str, Any] = AS_IT_IS, d: dict[str, Any] = AS_IT_IS, **sidecar: Any
) -> AsyncIterator[Pair]:
    """Settings as those of `tests.serve.live.live`; further names are the balancer's."""
    told: dict[str, Any] = {"kv_transfer__told": NIXL, "kv_transfer__side_channel_port": 0, **both}
    async with live(**told | p) as prefill, live(**told | d) as decode:
        prefills = (PrefillAddress(prefill.url, "127.0.0.1", None),)
        async with (
            router(sidecar=SidecarConfig(**sidecar), prefills=prefills, decodes=(decode.url,)) as url,
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
        ):
            yield Pair(prefill, decode, url, client)
