"""P/D with several data-parallel ranks in one server: who gets a request, and how the decode finds the rank (SGLang §2.5)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.serve.live import PATIENCE_S, LiveServer
from tests.serve.sglang.pair import until
from tests.serve.sglang_live import sample, sglang

from windtunnel.serve.sglang.disagg_flavour import DisaggFlavour

PROMPT = "[wt:a1] " + "prefill and then decode " * 20
BODY: dict[str, Any] = {"text": PROMPT, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}


@dataclass(frozen=True)
class Pair:
    p: LiveServer
    d: LiveServer
    client: httpx.AsyncClient

    async def generate(self, room: int, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> httpx.Response:
        """Both legs at once; the decode's answer."""
        told = BODY | {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(self.p), "bootstrap_room": room}
        legs = [self.client.post(f"{one.url}/generate", json=told | (more or {})) for one, more in ((self.p, p), (self.d, d))]
        return (await asyncio.gather(*legs))[1]

    async def until_idle(self) -> None:
        workers = [part.worker for one in (self.p, self.d) for part in parts(one)]
        await until(lambda: not any(any(worker.outstanding().values()) for worker in workers))
        for worker in workers:
            worker.check_integrity()


def parts(server: LiveServer) -> list[Any]:
    assert isinstance(server.server.flavour, DisaggFlavour)
    return server.server.flavour._parts


def bootstrap_port(server: LiveServer) -> int:
    return int(parts(server)[0].bootstrap_port)


def scheduled(server: LiveServer) -> list[float]:
    """Requests that each rank has scheduled."""
    return [sample(server, "queue_time_seconds_count", dp_rank=str(rank)) for rank in range(2)]


@contextlib.asynccontextmanager
async def pair(decode_ranks: int = 2, **both: Any) -> AsyncIterator[Pair]:
    told = {"disagg__bootstrap_port": 0, **both}
    async with (
        sglang(disagg__mode="prefill", data_parallel_size=2, **told) as p,
        sglang(disagg__mode="decode", data_parallel_size=decode_ranks, **told) as d,
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
    ):
        yield Pair(p, d, client)


async def _wanted() -> str:
    async with sglang() as server, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        return str((await client.post(f"{server.url}/generate", json=BODY)).json()["text"])


@pytest.mark.parametrize("decode_ranks", [1, 2])
async def test_a_room_tells_the_rank(decode_ranks: int) -> None:
    wanted = await _wanted()
    async with pair(decode_ranks) as pd:
        for room in (4, 5, 7):
            assert (await pd.generate(room)).json()["text"] == wanted
        assert scheduled(pd.p) == [1, 2]
        await pd.until_idle()


async def test_each_choice_goes_where_its_own_room_says() -> None:
    async with pair() as pd:
        params = {"sampling_params": BODY["sampling_params"] | {"n": 4}}
        answer = await pd.generate(10, params, params)
        assert len(answer.json()) == 4, answer.text
        assert scheduled(pd.p) == [2, 2]
        await pd.until_idle()


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "total_tokens"])
async def test_the_decode_asks_where_rooms_do_not_tell(method: str) -> None:
    """All rooms are even; four at once are spread all the same."""
    wanted = await _wanted()
    async with pair(disagg__load_balance_method=method) as pd:
        for answer in await asyncio.gather(*(pd.generate(room) for room in (2, 4, 6, 8))):
            assert answer.json()["text"] == wanted
        assert scheduled(pd.p) == [2, 2]
        await pd.until_idle()


async def test_a_named_rank_wins_on_both_sides() -> None:
    async with pair() as pd:
        answer = await pd.generate(4, {"routed_dp_rank": 1}, {"disagg_prefill_dp_rank": 1})
        assert answer.status_code == 200, answer.text
        assert scheduled(pd.p) == [0, 1]
        await pd.until_idle()


async def test_a_prefill_rank_that_is_not_there_ends_this_request_only() -> None:
    async with pair(1) as pd:
        told = BODY | {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(pd.p), "bootstrap_room": 4}
        answer = await pd.client.post(f"{pd.d.url}/generate", json=told | {"disagg_prefill_dp_rank": 7})
        assert (answer.status_code, "dp rank 7 is not one of the 2" in answer.text) == (500, True), answer.text
        assert (await pd.generate(5)).status_code == 200
        await pd.until_idle()


async def test_the_topology_names_every_rank() -> None:
    async with pair() as pd:
        query = "prefill_dp_rank={0}&prefill_cp_rank={1}&target_tp_rank={1}&target_pp_rank={1}"
        route = f"http://127.0.0.1:{bootstrap_port(pd.p)}/route?"
        assert (await pd.client.get(route + query.format(-1, -1))).json()["dp_size"] == 2
        ports = {(await pd.client.get(route + query.format(rank, 0))).json()["rank_port"] for rank in range(2)}
        assert len(ports) == 2
