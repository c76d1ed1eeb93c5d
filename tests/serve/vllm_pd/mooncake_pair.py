"""A prefill and a decode with Mooncake, and the router's part, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
from tests.serve.live import PATIENCE_S, LiveServer, RawClient, live, request_bytes
from tests.serve.vllm_pd.pair import AS_IT_IS, COMPLETION, at_rest, engine_of, until

PRODUCER = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
CONSUMER = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}


@dataclass
class MooncakePair:
    p: LiveServer
    d: LiveServer
    client: httpx.AsyncClient
    _numbers: Any = field(default_factory=count)

    def transfer(self) -> str:
        return f"xfer-{next(self._numbers)}"

    async def transport(self, server: LiveServer) -> dict[str, Any]:
        (part,) = (await self.client.get(f"{server.url}/debug/disaggregation")).json()
        told: dict[str, Any] = part["transport"]
        return told

    async def to_d(self, transfer_id: str, **more: Any) -> dict[str, Any]:
        told = await self.transport(self.p)
        known = await self.client.get(f"{told['bootstrap']}/query")
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": told["bootstrap"],
            "remote_engine_id": known.json()["0"]["engine_id"],
            **more,
        }

    async def prefill(self, transfer_id: str, path: str = "/v1/completions", body: Any = COMPLETION) -> httpx.Response:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        told = body | {name: 1 for name in ("max_tokens", "max_output_tokens") if name in body}
        return await self.client.post(self.p.url + path, json=told | {"stream": False, "kv_transfer_params": params})

    async def decode(self, transfer_id: str, path: str = "/v1/completions", body: Any = COMPLETION) -> httpx.Response:
        return await self.client.post(self.d.url + path, json=body | {"kv_transfer_params": await self.to_d(transfer_id)})

    async def both(self, path: str = "/v1/completions", body: Any = COMPLETION) -> httpx.Response:
        """At once, as vLLM's own proxy does."""
        transfer_id = self.transfer()
        _prefilled, answer = await asyncio.gather(self.prefill(transfer_id, path, body), self.decode(transfer_id, path, body))
        return answer

    async def leaving(self, server: LiveServer, params: dict[str, Any], **more: Any) -> RawClient:
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", COMPLETION | {"kv_transfer_params": params} | more))
        return client

    async def until_idle(self) -> None:
        await until(lambda: at_rest(self.p) and at_rest(self.d))
        for server in (self.p, self.d):
            server.server.engine.check_integrity()
            pool = engine_of(server)._scheduler.pool
            assert pool.free_blocks == pool.usable_blocks


@contextlib.asynccontextmanager
async def mooncake(
    both: dict[str, Any] = AS_IT_IS, p: dict[str, Any] = AS_IT_IS, d: dict[str, Any] = AS_IT_IS
) -> AsyncIterator[MooncakePair]:
    told: dict[str, Any] = {"kv_transfer__mooncake_bootstrap_port": 0, **both}
    async with (
        live(**{"kv_transfer__told": PRODUCER} | told | p) as prefill,
        live(**{"kv_transfer__told": CONSUMER} | told | d) as decode,
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
    ):
        yield MooncakePair(prefill, decode, client)


def counters(server: LiveServer) -> dict[str, int]:
    """Those that are not 0, without their prefix."""
    return {name.removeprefix("mooncake_num_"): n for name, n in engine_of(server).connector.counters.items() if n}
