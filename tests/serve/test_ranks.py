"""Data-parallel ranks: who gets a request, and what shows which rank it was."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.core.sglang.driving import request
from tests.serve.golden import split
from tests.serve.live import FOREVER_NS, LiveServer, RawClient, live, request_bytes
from tests.serve.test_kv_events import ON, BlockIndex, cached, subscriber, words
from tests.serve.test_operations import call

from windtunnel.core.outputs import StepOutput, StepStats
from windtunnel.core.units import MS
from windtunnel.serve.ranks import REPORT_INTERVAL_NS, Balancer
from windtunnel.wire.kv_events import decode
from windtunnel.wire.metrics import render

BODY = {"model": "wt-model", "prompt": "storm [wt:7]", "max_tokens": 50, "ignore_eos": True, "stream": True}
ASKED = request("any")
SLOW = {"dev_mode": True, "pacing__itl_ns": FOREVER_NS, "data_parallel_size": 3}


def report(balancer: Balancer, rank: int, waiting: int, running: int, deferred: int = 0) -> None:
    balancer.on_step(rank, StepOutput(0, stats=StepStats(running, waiting, deferred, 0.0)), 0)


def test_equal_ranks_take_turns_between_two_reports() -> None:
    balancer = Balancer(3)
    assert [balancer.choose(ASKED, MS) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_waiting_request_weighs_as_much_as_four_running_ones() -> None:
    balancer = Balancer(2)
    report(balancer, 0, waiting=1, running=0)
    report(balancer, 1, waiting=0, running=5)
    assert [balancer.choose(ASKED, 0), balancer.choose(ASKED, 0)] == [0, 1]
    balancer = Balancer(2)
    report(balancer, 0, waiting=0, running=0, deferred=2)
    report(balancer, 1, waiting=0, running=7)
    assert balancer.choose(ASKED, 0) == 1


def test_reports_are_read_every_hundred_milliseconds() -> None:
    balancer = Balancer(2)
    assert balancer.choose(ASKED, 0) == 0
    report(balancer, 0, waiting=0, running=0)
    report(balancer, 1, waiting=0, running=50)
    assert balancer.choose(ASKED, REPORT_INTERVAL_NS - 1) == 1
    assert [balancer.choose(ASKED, REPORT_INTERVAL_NS + at) for at in range(3)] == [0, 0, 0]


def ranks(server: LiveServer) -> list[int]:
    """How many requests each rank holds."""
    return [len(engine.live()) for engine in server.server.engines]


async def start(server: LiveServer, rank: int | None = None, **members: Any) -> RawClient:
    """A stream that has given its first token and will not give another."""
    client = await RawClient.connect(server.port)
    extra = "Connection: close\r\n" + ("" if rank is None else f"X-data-parallel-rank: {rank}\r\n")
    client.send(request_bytes("/v1/completions", BODY | members, extra=extra))
    await client.read_until(b"\n\n")
    return client


async def test_requests_spread_and_the_header_names_a_rank() -> None:
    async with live(**SLOW) as server:
        clients = [await start(server, 2) for _ in range(2)]
        assert ranks(server) == [0, 0, 2]
        clients += [await start(server, 1)]
        assert ranks(server) == [0, 1, 2]
        for client in clients:
            client.leave("fin")


async def test_the_prompts_of_one_request_spread_and_their_choices_stay_together() -> None:
    async with live(**SLOW) as server:
        client = await start(server, prompt=["a", "b", "c"], n=2, temperature=1.0)
        await server.until(lambda: ranks(server) == [2, 2, 2])
        client.leave("rst")
        await server.until(lambda: ranks(server) == [0, 0, 0] and not server.server.jobs)
        for engine in server.server.engines:
            engine.check_integrity()


@pytest.mark.parametrize("mechanism", ["fin", "rst"])
async def test_an_abort_reaches_its_rank_and_no_other(mechanism: str) -> None:
    async with live(**SLOW) as server:
        staying, leaving = await start(server, 0), await start(server, 2)
        await server.until(lambda: gauges(server, "vllm:num_requests_running") == {"0": 1, "1": 0, "2": 1})
        steps = [driver.steps for driver in server.server.driver.drivers]
        leaving.leave(mechanism)
        await server.until(lambda: gauges(server, "vllm:num_requests_running") == {"0": 1, "1": 0, "2": 0})
        assert [driver.steps for driver in server.server.driver.drivers] == [steps[0], steps[1], steps[2] + 1]
        assert ranks(server) == [1, 0, 0]
        staying.leave("fin")


def samples(server: LiveServer) -> list[Any]:
    text = render(server.server.metrics.store).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def gauges(server: LiveServer, name: str) -> dict[str, float]:
    return {sample.labels["engine"]: sample.value for sample in samples(server) if sample.name == name}


async def test_every_engine_series_exists_for_every_rank() -> None:
    async with live(**SLOW) as server:
        by_rank: dict[str, set[str]] = {}
        for sample in samples(server):
            if "engine" in sample.labels:
                by_rank.setdefault(sample.labels["engine"], set()).add(sample.name)
        assert set(by_rank) == {"0", "1", "2"}
        assert by_rank["0"] == by_rank["1"] == by_rank["2"]
        assert "vllm:cache_config_info" in by_rank["2"]


async def test_debug_requests_shows_the_rank() -> None:
    async with live(**SLOW) as server:
        clients = [await start(server, rank) for rank in (2, 0)]
        _status, answer = await call(server, "GET", "/debug/requests")
        assert sorted(view["rank"] for view in answer["live"]) == [0, 2]
        for client in clients:
            client.leave("fin")


@pytest.mark.parametrize("rank", ["3", "-1"])
async def test_a_rank_that_does_not_exist_is_a_400(rank: str) -> None:
    async with live(**SLOW) as server:
        client = await RawClient.connect(server.port)
        extra = f"Connection: close\r\nX-data-parallel-rank: {rank}\r\n"
        client.send(request_bytes("/v1/completions", BODY | {"stream": False}, extra=extra))
        status, _headers, answer = split(await client.read_all())
        assert status == 400
        assert json.loads(answer)["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, 3)."
        assert ranks(server) == [0, 0, 0]


async def test_operators_reach_all_ranks() -> None:
    async with live(**SLOW) as server:
        clients = [await start(server, rank) for rank in range(3)]
        assert await call(server, "POST", "/pause?mode=abort") == (200, {"status": "paused"})
        for client in clients:
            assert b'"finish_reason":"abort"' in await client.read_all()
        assert [engine.control.paused for engine in server.server.engines] == ["abort"] * 3
        assert (await call(server, "POST", "/resume"))[0] == 200
        assert await call(server, "GET", "/get_world_size") == (200, {"world_size": 3})
        assert (await call(server, "POST", "/debug/engine_death"))[0] == 200
        assert (await call(server, "GET", "/health"))[0] == 503


async def test_a_refusal_by_one_rank_leaves_nothing_on_the_others() -> None:
    async with live(**SLOW, scheduler__max_num_queued_reqs=1) as server:
        holder = await start(server, 1)
        client = await RawClient.connect(server.port)
        client.send(
            request_bytes("/v1/completions", BODY | {"prompt": ["a", "b", "c"], "stream": False}, extra="Connection: close\r\n")
        )
        status, _headers, _answer = split(await client.read_all())
        assert status == 503
        assert ranks(server) == [0, 1, 0]
        assert list(server.server.metrics.live()) == [view.request_id for view in server.server.engines[1].live()]
        holder.leave("fin")


async def test_each_rank_publishes_its_own_events() -> None:
    with subscriber() as first:
        base = int(first.endpoint.rpartition(":")[2])
        events = {
            "kv_events__endpoint": first.endpoint,
            "kv_events__replay_endpoint": "tcp://127.0.0.1:0",
            "data_parallel_size": 2,
        }
        async with live(**ON | events) as server:
            for number in range(4):
                body = {"model": "wt-model", "prompt": words(f"p{number} "), "max_tokens": 3, "ignore_eos": True}
                extra = f"X-data-parallel-rank: {number % 2}\r\n"
                assert (await call(server, "POST", "/v1/completions", body, extra))[0] == 200
            _status, sources = await call(server, "GET", "/kv_event_sources")
            assert [sources[rank]["endpoint"] for rank in ("0", "1")] == [first.endpoint, f"tcp://127.0.0.1:{base + 1}"]
            known = []
            for rank in (0, 1):
                answers = await first.replay(sources[str(rank)]["replay_endpoint"], 0)
                batches = [decode(frames[3]) for frames in answers[:-1]]
                assert {batch.rank for batch in batches} == {rank}
                index = BlockIndex()
                for batch in batches:
                    index.apply(batch)
                assert index.hashes == cached(server, rank)
                known.append(index.hashes)
            assert known[0] and known[1] and known[0] != known[1]
