"""Storms over HTTP/2 and gRPC: every way of leaving there, planted defects by name, and nothing without one."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.lab.fake_doors import grpc_door, http2_door
from tests.lab.fake_server import FakeServer
from tests.lab.test_findings import PLAN, names

from windtunnel.core.units import MS, S
from windtunnel.lab.connection import How, parse_origin
from windtunnel.lab.dry_run import describe
from windtunnel.lab.findings import find
from windtunnel.lab.plan import METRICS_BYSTANDER, Moment, PlanError, Role, Shape, StormPlan, Trigger
from windtunnel.lab.record import End, StormResult
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import TargetError, find_context, find_model, make_target

CANCEL = replace(PLAN, how=(How.RST_STREAM,))
GRPC_DEFECTS = {
    "leak-slot": "slot_leak",
    "leak-kv": "kv_leak",
    "leak-queue": "queue_orphan",
    "stale-gauge": "stale_gauge",
    "deaf": "zombie_tokens",
    "drift": "gauge_drift",
    "miscount": "cancel_miscounted",
    "crossed": "crossed_stream",
    "lose-word": "corrupt_stream",
    "short": "corrupt_stream",
    "no-done": "unterminated_stream",
    "bystander-500": "bystander_error",
    "abort-others": "collateral_abort",
    "wedge": "wedged",
}
PLANS = {
    "stale-gauge": replace(CANCEL, bystander_kinds=(METRICS_BYSTANDER,)),
    "deaf": replace(CANCEL, quiet_deadline_ns=10 * S),
    "wedge": replace(
        CANCEL, request_timeout_ns=3 * S, bystander_kinds=(METRICS_BYSTANDER,), survivors=0, later_concurrency=PLAN.later
    ),
}


async def blow_grpc(plan: StormPlan, *defects: str) -> StormResult:
    fake = FakeServer(frozenset(defects))
    port = await fake.start()
    try:
        async with grpc_door(fake) as (grpc_port, door):
            metrics = [f"http://127.0.0.1:{port}/metrics"]
            result = await run_storm(make_target(f"grpc://127.0.0.1:{grpc_port}", "fake", metrics_urls=metrics), plan)
        assert door.peers
        return result
    finally:
        await fake.stop()


async def blow_http2(plan: StormPlan, *defects: str, deaf: bool = False) -> tuple[StormResult, set[object]]:
    """(the result, the TCP connections that carried it)."""
    fake = FakeServer(frozenset(defects))
    worker = f"http://127.0.0.1:{await fake.start()}"
    try:
        async with http2_door(worker, deaf=deaf) as (port, proxy):
            target = make_target(f"h2c://127.0.0.1:{port}", "fake", metrics_urls=[f"{worker}/metrics"])
            result = await run_storm(target, plan)
        assert proxy.versions == {"2"}
        return result, proxy.clients
    finally:
        await fake.stop()


@pytest.mark.parametrize(("defect", "finding"), GRPC_DEFECTS.items())
async def test_a_defect_behind_grpc_raises_its_finding(defect: str, finding: str) -> None:
    assert finding in names(find(await blow_grpc(PLANS.get(defect, CANCEL), defect)))


GRPC_WAYS: dict[How, StormPlan] = {
    How.RST_STREAM: CANCEL,
    How.FIN: replace(PLAN, how=(How.FIN,)),
    How.RST: replace(PLAN, how=(How.RST,)),
    How.STOP_READING: replace(PLAN, how=(How.STOP_READING,), stall_ns=20 * MS),
    How.DEADLINE: replace(PLAN, how=(How.DEADLINE,), when=Trigger(Moment.AFTER, 0, 100 * MS)),
    How.TIMEOUT_RETRY: replace(PLAN, how=(How.TIMEOUT_RETRY,), victim=Shape(max_tokens=40)),
    How.ABORT_ID: replace(PLAN, how=(How.ABORT_ID,), linger_ns=20 * S),
}


@pytest.mark.parametrize("how", GRPC_WAYS)
async def test_every_way_of_leaving_grpc_leaves_and_a_clean_server_raises_nothing(how: How) -> None:
    result = await blow_grpc(GRPC_WAYS[how])
    victims = result.of(Role.VICTIM)
    assert victims
    assert {(victim.end, victim.left_by) for victim in victims} == {(End.LEFT, how.value)}
    assert result.oracle
    assert not result.front
    assert all(stream.complete for stream in result.of(Role.SURVIVOR, Role.LATER, Role.RETRY))
    assert {victim.finish_reason for victim in victims} == {"abort" if how is How.ABORT_ID else None}
    assert find(result) == ()


async def test_answers_that_are_not_streamed_are_read_too() -> None:
    plan = replace(CANCEL, victim=Shape(max_tokens=400, stream=False), when=Trigger(Moment.AFTER, 0, 30 * MS))
    result = await blow_grpc(replace(plan, later_shape=Shape(stream=False)))
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}
    assert all(len(stream.words) == 16 for stream in result.of(Role.LATER))
    assert find(result) == ()


async def test_a_status_is_what_it_would_be_over_http() -> None:
    result = await blow_grpc(replace(CANCEL, later=2), "hidden-error")
    assert {(one.end, one.status) for one in result.of(Role.LATER)} == {(End.ERROR_STATUS, 500)}
    assert "INTERNAL: engine says no" in str(result.of(Role.LATER)[0].error)


@contextlib.asynccontextmanager
async def worker(*flags: str) -> AsyncIterator[int]:
    """The port of a simulated server that speaks HTTP and gRPC there."""
    command = [sys.executable, "-m", "windtunnel", "serve", "m", "--port", "0", "--grpc-on-http-port", "--itl", "5ms", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while not (found := re.search(rb"running on http://127.0.0.1:(\d+)", await process.stderr.readline())):
                assert not process.stderr.at_eof()
        yield int(found[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_simulated_workers_raise_nothing_over_grpc(engine: str) -> None:
    async with worker("--engine", engine) as port:
        url = f"grpc://127.0.0.1:{port}"
        plan = replace(CANCEL, how=(How.RST_STREAM, How.FIN, How.RST), victims=6, quiet_deadline_ns=10 * S)
        result = await run_storm(make_target(url, await find_model(url, {})), plan)
    assert result.kind == engine
    assert result.oracle
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}
    assert find(result) == ()


@pytest.mark.parametrize(
    ("engine", "fault", "finding", "max_tokens", "quiet_s"),
    [
        ("vllm", "deaf-to-disconnect", "zombie_tokens", 4_000, 2),
        ("sglang", "deaf-to-disconnect", "zombie_tokens", 1_800, 60),
        ("vllm", "stale-gauges-after-abort", "stale_gauge", 400, 1),
    ],
)
async def test_planted_defects_of_simulated_workers_are_found_over_grpc(
    engine: str, fault: str, finding: str, max_tokens: int, quiet_s: int
) -> None:
    """SGLang counts tokens when their request ends, so that end is waited for: nine seconds, of which 4.5 must be witnessed."""
    async with worker("--engine", engine, "--fault", fault) as port:
        plan = replace(CANCEL, bystander_kinds=(METRICS_BYSTANDER,), survivors=0, victim=Shape(max_tokens=max_tokens))
        plan = replace(plan, quiet_deadline_ns=quiet_s * S)
        found = find(await run_storm(make_target(f"grpc://127.0.0.1:{port}", "m"), plan))
    assert finding in names(found)


HTTP2_WAYS: dict[How, StormPlan] = {
    **{how: replace(PLAN, how=(how,)) for how in (How.RST_STREAM, How.FIN, How.RST, How.HALF_CLOSE, How.KILL)},
    How.STOP_READING: replace(PLAN, how=(How.STOP_READING,), stall_ns=20 * MS),
}


@pytest.mark.parametrize("how", HTTP2_WAYS)
async def test_every_way_of_leaving_http2_leaves_and_a_clean_server_raises_nothing(how: How) -> None:
    result, connections = await blow_http2(HTTP2_WAYS[how])
    victims = result.of(Role.VICTIM)
    assert {(victim.end, victim.left_by) for victim in victims} == {(End.LEFT, how.value)}
    assert all(stream.complete for stream in result.of(Role.SURVIVOR, Role.LATER))
    assert find(result) == ()
    shared = how in (How.RST_STREAM, How.STOP_READING)
    assert len(connections) == (1 if shared else 1 + len(victims))


async def test_a_request_over_http2_can_be_left_before_it_is_whole() -> None:
    result, _ = await blow_http2(replace(CANCEL, when=Trigger(Moment.INCOMPLETE, 0)))
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"incomplete"}
    assert find(result) == ()


@pytest.mark.parametrize(
    ("defect", "finding"), [("leak-slot", "slot_leak"), ("lose-word", "corrupt_stream"), ("no-done", "unterminated_stream")]
)
async def test_a_defect_behind_http2_raises_its_finding(defect: str, finding: str) -> None:
    result, _ = await blow_http2(CANCEL, defect)
    assert finding in names(find(result))


async def test_a_proxy_that_does_not_pass_a_reset_on_is_named() -> None:
    result, _ = await blow_http2(replace(CANCEL, quiet_deadline_ns=10 * S, victim=Shape(max_tokens=1000)), deaf=True)
    assert "abort_not_propagated" in names(find(result))


async def test_a_large_prompt_passes_the_windows_of_http2() -> None:
    result, _ = await blow_http2(replace(CANCEL, later=2, later_shape=Shape(prompt_words=40_000)))
    assert [stream.end for stream in result.of(Role.LATER)] == [End.FINISHED] * 2


@pytest.mark.parametrize(
    ("url", "plan", "told"),
    [
        ("http://127.0.0.1:1", CANCEL, "rst-stream is for HTTP/2 and gRPC"),
        ("h2c://127.0.0.1:1", GRPC_WAYS[How.DEADLINE], "deadline is for gRPC"),
        ("grpc://127.0.0.1:1", replace(PLAN, how=(How.KILL, How.HALF_CLOSE)), "half-close, kill is for HTTP"),
        ("grpc://127.0.0.1:1", replace(CANCEL, when=Trigger(Moment.INCOMPLETE, 0)), "incomplete is for HTTP"),
        ("grpc://127.0.0.1:1", replace(PLAN, how=(How.DEADLINE,)), "deadline is a time from the start"),
    ],
)
async def test_what_a_protocol_cannot_do_is_refused(url: str, plan: StormPlan, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        await run_storm(make_target(url, "m"), plan)


@pytest.mark.parametrize("url", ["grpc://127.0.0.1", "grpc://127.0.0.1:1/v1", "ftp://127.0.0.1"])
def test_a_bad_address_is_told_the_right_form(url: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_origin(url)


async def test_nobody_at_the_port_is_a_target_error(deaf_port: int) -> None:
    with pytest.raises(TargetError, match="neither VllmEngine nor SglangScheduler answers"):
        await find_model(f"grpc://127.0.0.1:{deaf_port}", {})


async def test_a_grpc_port_without_metrics_is_told_how_to_name_them() -> None:
    async with grpc_door(FakeServer()) as (port, _):
        with pytest.raises(TargetError, match="--metrics-url"):
            await run_storm(make_target(f"grpc://127.0.0.1:{port}", "fake"), CANCEL)


async def test_a_worker_tells_its_model_and_its_context() -> None:
    async with grpc_door(FakeServer()) as (port, _):
        assert await find_model(f"grpc://127.0.0.1:{port}", {}) == "fake"
        assert await find_context(make_target(f"grpc://127.0.0.1:{port}", "fake")) == 4096


def test_a_dry_run_shows_the_calls() -> None:
    assert "victim: Generate wt-" in describe(make_target("grpc://127.0.0.1:1", "m"), CANCEL)
