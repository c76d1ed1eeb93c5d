"""Every planted defect of a real server is found under its right name and no other, and nothing is found without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.fake_server import DEFECTS
from tests.own_time import own_time
from tests.serve.live import LiveServer, live

from windtunnel.core.units import MS, S
from windtunnel.faults.catalogue import CATALOGUE
from windtunnel.lab.arms import running
from windtunnel.lab.connection import How
from windtunnel.lab.findings import KINDS, find, primary
from windtunnel.lab.plan import Api, Shape, StormPlan
from windtunnel.lab.proxy import Proxy
from windtunnel.lab.selftest import BATTERY, DRAIN, FURTHER, Case, fitted
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target

STORMS = dict(BATTERY)
SHOWN_BY = {
    "response-object-reuse": "crowd",
    "deaf-to-disconnect": "crowd",
    "late-abort": "everybody leaves",
    "stale-gauges-after-abort": "everybody leaves",
    "head-of-line-wedge": "long prompt",
    "engine-freeze": "everybody leaves",
    "cut-stream": "crowd",
    "error-in-stream": "crowd",
    "empty-success": "everybody leaves",
    "lost-tokens": "everybody leaves",
    "engine-death": "crowd",
    "slot-leak-on-abort": "everybody leaves",
    "kv-leak-on-abort": "everybody leaves",
    "orphan-in-queue": "everybody leaves",
    "counts-down-on-success-only": "everybody leaves",
    "counted-out-twice": "everybody leaves",
    "written-into-others": "crowd",
    "abort-by-prefix": "crowd",
    "cancelled-as-finished": "everybody leaves",
    "blocking-cleanup": "pairs",
}
"""Defect → a storm of the battery that shows it."""
LONGER: dict[str, dict[str, object]] = {
    "crowd": {"survivor": Shape(max_tokens=250)},
    "pairs": {"rounds": 14},
}
"""So that survivors outlast the departures, however busy the machine is."""
LATE = (
    "late-abort:3s",
    replace(STORMS["everybody leaves"], victim=Shape(Api.CHAT, max_tokens=1_900), quiet_deadline_ns=20 * S),
)
"""Later than a second, and all of it within the wait for quiet: what a stall leaves of it is still over the grace."""
ELSEWHERE = {
    "abort_not_propagated": "test_a_proxy_before_a_real_server",
    "drain_timeout": "test_a_server_that_hangs_at_its_end",
    "retry_storm_amplified": "test_retries_against_a_server_that_does_not_listen",
    "transfer_orphan": "tests.lab.test_planted_pairs",
    "lease_expired": "tests.lab.test_planted_pairs",
    "hidden_cleanup": "tests.lab.test_queues, windtunnel experiment run pd-abort-storm",
    "unreachable": "tests.lab.test_findings (fake server)",
}


@asynccontextmanager
async def server(*faults: str) -> AsyncIterator[LiveServer]:
    async with live(faults=faults, scheduler__max_model_len=2048) as one:
        one.server.reconfigure({"ttft": "10ms", "itl": "4ms"})
        yield one


async def names_after(plan: StormPlan, *faults: str) -> list[str]:
    with own_time(asyncio.get_running_loop()):
        async with server(*faults) as one:
            target = make_target(one.url, "wt-model")
            result = await run_storm(target, await fitted(target, plan))
    return [finding.name for finding in primary(find(result))]


def longer(storm: str, finding: str | None = None) -> StormPlan:
    """With all the time that an answer may take on a busy machine, unless somebody is to wait in vain."""
    timeout_ns = STORMS[storm].request_timeout_ns if finding == "wedged" else 60 * S
    return replace(STORMS[storm], request_timeout_ns=timeout_ns, **LONGER.get(storm, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", SHOWN_BY)
async def test_a_planted_defect_is_named(fault: str) -> None:
    finding = CATALOGUE[fault].finding
    told, plan = LATE if fault == "late-abort" else (fault, longer(SHOWN_BY[fault], finding))
    assert await names_after(plan, told) == [finding]


@pytest.mark.parametrize("storm", STORMS)
async def test_nothing_is_named_without_one(storm: str) -> None:
    assert await names_after(longer(storm)) == []


def test_every_defect_and_every_finding_has_a_test() -> None:
    assert set(SHOWN_BY) == {name for name, entry in CATALOGUE.items() if not entry.pair}
    planted = {CATALOGUE[fault].finding for fault in SHOWN_BY} | set(DEFECTS.values())
    assert planted | set(ELSEWHERE) == {kind.name for kind in KINDS}
    assert {case.finding for case in FURTHER if case.fault not in CATALOGUE} <= set(ELSEWHERE)


@pytest.mark.parametrize(("keep", "expected"), [(True, ["abort_not_propagated"]), (False, [])])
async def test_a_proxy_before_a_real_server(keep: bool, expected: list[str]) -> None:
    with own_time(asyncio.get_running_loop()):
        async with server() as worker:
            front = await asyncio.start_server(Proxy(worker.port, keep_upstream=keep).serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
            target = make_target(url, "wt-model", metrics_urls=[f"{worker.url}/metrics"])
            try:
                result = await run_storm(target, STORMS["everybody leaves"])
            finally:
                front.close()
    assert [one.name for one in primary(find(result))] == expected


RETRIES = StormPlan(
    victims=6,
    how=(How.TIMEOUT_RETRY,),
    retries=1,
    victim=Shape(max_tokens=400),
    bystanders=0,
    later=2,
    sample_every_ns=20 * MS,
    quiet_deadline_ns=5 * S,
)


@pytest.mark.parametrize("fault", ["deaf-to-disconnect", None])
async def test_retries_against_a_server_that_does_not_listen(fault: str | None) -> None:
    """The attempts that were given up run beside their retries; both end at the same time, so no work for nobody is seen."""
    with own_time(asyncio.get_running_loop()):
        async with server(*([fault] if fault else [])) as one:
            result = await run_storm(make_target(one.url, "wt-model"), RETRIES)
    assert ("retry_storm_amplified" in [finding.name for finding in find(result)]) is (fault is not None)
    assert bool(find(result)) is (fault is not None)


@pytest.mark.parametrize("planted", [True, False])
async def test_a_server_that_hangs_at_its_end(planted: bool, tmp_path: Path) -> None:
    case = next(case for case in FURTHER if case.finding == "drain_timeout")
    async with running(case.arm(planted=planted), tmp_path / "log", time_scale=1.0, seed=1) as one:
        plan = replace(DRAIN, drain_deadline_ns=2 * S)
        result = await run_storm(make_target(one.url, "windtunnel"), plan, pid=one.pid)
    assert [finding.name for finding in find(result)] == (["drain_timeout"] if planted else [])


def test_a_case_without_its_defect_is_the_plain_server() -> None:
    case = Case("late-abort", "late_cancel")
    assert (case.arm(planted=True).command or "").endswith("--fault late-abort")
    assert "--fault" not in (case.arm(planted=False).command or "")
