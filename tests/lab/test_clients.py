"""A storm whose requests are sent by several processes is the same storm."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from tests.lab.conftest import until
from tests.lab.fake_server import FakeServer

from windtunnel.core.units import MS, S
from windtunnel.lab.arms import running
from windtunnel.lab.clients import SpreadClients, _clock_offset_ns, _Peer
from windtunnel.lab.connection import How
from windtunnel.lab.document import storm_document, storm_report
from windtunnel.lab.experiment_file import Arm
from windtunnel.lab.findings import find
from windtunnel.lab.leave import Gate, Leave
from windtunnel.lab.messages import Ready, decode, encode
from windtunnel.lab.pipes import ClientsError, ProcessPipe, open_pipes
from windtunnel.lab.plan import Api, Moment, PlanError, Role, Shape, StormPlan, Trigger, check_plan
from windtunnel.lab.record import Ask, BystanderRecord, End, StormResult, StreamRecord
from windtunnel.lab.report import schema
from windtunnel.lab.session import Session
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import Target, make_target

PLAN = StormPlan(
    victims=8,
    survivors=4,
    how=(How.FIN, How.RST),
    when=Trigger(Moment.TOKENS, 3),
    victim=Shape(max_tokens=400),
    survivor=Shape(max_tokens=20),
    bystanders=8,
    later=6,
    sample_every_ns=10 * MS,
    quiet_deadline_ns=5 * S,
    seed=7,
)
SPREAD = replace(PLAN, clients=3)
TIMES = {"started_ns", "ended_ns", "head_ns", "frame_ns", "left_ns", "due_ns", "sent_ns", "gone_ns"}


@asynccontextmanager
async def fake(*defects: str, **options: Any) -> AsyncIterator[tuple[FakeServer, Target]]:
    server = FakeServer(frozenset(defects), **options)
    port = await server.start()
    try:
        yield server, make_target(f"http://127.0.0.1:{port}", "fake")
    finally:
        await server.stop()


async def blow(plan: StormPlan, *defects: str) -> StormResult:
    async with fake(*defects) as (_, target):
        return await run_storm(target, plan)


def timeless(record: StreamRecord | BystanderRecord) -> tuple[Any, ...]:
    """All of a record but when it happened; of frames, how many."""
    frames = len(record.frame_ns) if isinstance(record, StreamRecord) else 0
    return (frames, *(getattr(record, field.name) for field in fields(record) if field.name not in TIMES))


def essence(result: StormResult) -> dict[str, Any]:
    """What must be the same wherever the requests were sent from."""
    return {
        "streams": sorted(map(timeless, result.streams), key=repr),
        "bystanders": sorted(map(timeless, result.bystanders), key=repr),
        "findings": find(result),
        "finished": result.settled.counters["request_success{length}"] if result.settled else None,
        "notes": result.notes,
        "oracle": result.oracle,
    }


@pytest.mark.parametrize("defects", [(), ("bystander-500", "short")])
async def test_three_processes_give_what_one_gives(defects: tuple[str, ...]) -> None:
    one, three = await blow(PLAN, *defects), await blow(SPREAD, *defects)
    if defects:
        assert {finding.name for finding in find(three)} == {finding.name for finding in find(one)} != set()
        return
    assert essence(three) == essence(one)
    assert three.lost_clients == ()
    assert len({stream.ask.request_id for stream in three.streams}) == len(three.streams) == len(one.streams)


async def test_the_requests_are_spread_and_their_times_are_of_one_clock() -> None:
    result = await blow(SPREAD)
    ends = {phase.name: phase.ended_ns for phase in result.phases}
    for stream in result.of(Role.VICTIM, Role.SURVIVOR, Role.LATER):
        assert 0 < stream.started_ns <= stream.frame_ns[0] <= stream.ended_ns
    for victim in result.of(Role.VICTIM):
        assert victim.left_ns is not None and victim.left_ns <= ends["storm"]
    document = storm_document(result)
    assert document["clients"] == {"processes": 3, "on": "processes", "lost": []}


async def test_the_gate_holds_over_all_processes() -> None:
    plan = replace(SPREAD, hold=True, victims=9, survivors=0, bystanders=0)
    async with fake(itl_s=0.002, spread_s=0.002) as (_, target):
        result = await run_storm(target, plan)
    victims = result.of(Role.VICTIM)
    third = max(victim.frame_ns[2] for victim in victims)
    assert {victim.end for victim in victims} == {End.LEFT}
    assert all(victim.left_ns is not None and victim.left_ns >= third for victim in victims)


async def test_who_ends_before_the_gate_does_not_hold_it() -> None:
    gate = Gate(2, 600 * S)
    long, short = (
        Ask(tag, Role.VICTIM, 0, Api.COMPLETIONS, f"[wt:{tag:x}]", tokens, True) for tag, tokens in ((1, 100_000), (2, 2))
    )
    async with fake(itl_s=0.001) as (_, target):
        clients = SpreadClients(Session(target, 600 * S, 0))
        await clients.start(2, "processes")
        try:
            async with asyncio.timeout(60):
                records = await asyncio.gather(
                    clients.run(long, Leave(How.FIN, Trigger(Moment.TOKENS, 1), gate=gate)),
                    clients.run(short, Leave(How.FIN, Trigger(Moment.TOKENS, 3), gate=gate)),
                )
        finally:
            await clients.close()
    assert [record.end for record in records] == [End.LEFT, End.FINISHED]


async def test_who_is_held_is_released_when_a_client_process_dies() -> None:
    gate = Gate(2, 600 * S)
    asks = [Ask(tag, Role.VICTIM, 0, Api.COMPLETIONS, f"[wt:{tag:x}]", 100_000, True) for tag in (1, 2)]
    async with fake(itl_s=0.001) as (server, target):
        clients = SpreadClients(Session(target, 600 * S, 0))
        await clients.start(2, "processes")
        leaves = [Leave(How.FIN, Trigger(Moment.TOKENS, count), gate=gate) for count in (1, 90_000)]
        running = [asyncio.ensure_future(clients.run(*pair)) for pair in zip(asks, leaves, strict=True)]
        try:
            await until(lambda: server.running == 2)
            holder = next(pid for pid in client_processes() if f"pid {pid} " in clients._peer_for(1).pipe.name)  # type: ignore[union-attr]
            os.kill(holder, signal.SIGKILL)
            async with asyncio.timeout(60):
                records = await asyncio.gather(*running)
        finally:
            await clients.close()
    assert [record.end for record in records] == [End.LEFT, End.CLIENT_DIED]


async def test_states_of_the_target_are_asked_for_by_message() -> None:
    patient = replace(SPREAD, survivors=0, bystanders=0, state_patience_ns=60 * S)
    plan = replace(patient, when=Trigger(Moment.QUEUED, 0), victim=Shape(max_tokens=100_000))
    async with fake(itl_s=0.001) as (server, target):
        server.debug = True
        storm = asyncio.create_task(run_storm(target, plan))
        await until(lambda: server.running == plan.victims)
        server.live = {f"cmpl-{one}-0-x": "queued" for one in server.ids.values()}
        result = await storm
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"queued"}


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def client_processes() -> list[int]:
    return [pid for pid in children() if b"client_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_client_process_that_is_killed_is_reported() -> None:
    """Nobody leaves before all have come and one is killed."""
    plan = replace(SPREAD, victim=Shape(max_tokens=100_000), survivors=0, later=3)
    async with fake(itl_s=0.001, silent_after=1) as (server, target):
        storm = asyncio.create_task(run_storm(target, plan))
        await until(lambda: server.running == plan.victims)
        killed = client_processes()[0]
        os.kill(killed, signal.SIGKILL)
        server.goes_on.set()
        result = await storm
    (lost,) = result.lost_clients
    assert str(killed) in lost.name
    assert "SIGKILL" in lost.why
    dead = [stream for stream in result.streams if stream.end is End.CLIENT_DIED]
    assert len(dead) == lost.requests > 0
    assert all("SIGKILL" in (stream.error or "") for stream in dead)
    assert len(result.of(Role.VICTIM)) == plan.victims
    assert all(stream.complete for stream in result.of(Role.LATER))
    assert result.untried is not None and "SIGKILL" in result.untried
    assert find(result) == ()
    document = storm_report(target, result)
    validate(document, schema("storm"))
    assert document["clients"]["lost"][0]["requests"] == lost.requests
    assert document["victims"]["by_end"]["client_died"] == lost.requests
    assert client_processes() == []


async def test_a_client_process_that_is_stuck_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.lab.clients.STUCK_AFTER_NS", 0)
    plan = replace(SPREAD, victim=Shape(max_tokens=100_000), survivors=0, later=3)
    async with fake(silent_after=1) as (server, target):
        storm = asyncio.create_task(run_storm(target, replace(plan, request_timeout_ns=8 * S)))
        await until(lambda: server.running == plan.victims)
        os.kill(client_processes()[0], signal.SIGSTOP)
        server.goes_on.set()
        result = await storm
    (lost,) = result.lost_clients
    assert lost.why == "was killed: no answer within 8 s"
    assert lost.requests > 0
    assert all(stream.complete for stream in result.of(Role.LATER))
    assert client_processes() == []


async def test_without_any_client_process_the_storm_still_ends() -> None:
    plan = replace(SPREAD, victim=Shape(max_tokens=100_000), hold=True, survivors=0, request_timeout_ns=60 * S)
    async with fake("no-metrics", silent_after=1) as (server, target):
        storm = asyncio.create_task(run_storm(target, plan))
        await until(lambda: server.running == plan.victims)
        for pid in client_processes():
            os.kill(pid, signal.SIGKILL)
        result = await storm
    assert len(result.lost_clients) == 3
    assert {stream.end for stream in result.of(Role.LATER, Role.VICTIM)} == {End.CLIENT_DIED}
    assert find(result) == ()


async def test_cancelling_leaves_no_client_process() -> None:
    long = Shape(max_tokens=100_000)
    plan = replace(SPREAD, victim=long, survivor=long)
    async with fake(silent_after=1) as (server, target):
        storm = asyncio.create_task(run_storm(target, plan))
        await until(lambda: server.running == plan.victims + plan.survivors)
        assert len(client_processes()) == 3
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
        await until(lambda: server.running == 0)
    assert client_processes() == []


async def test_a_process_that_does_not_start_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.devnull)
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    monkeypatch.setenv("PYTHONHOME", os.devnull)
    with pytest.raises(ClientsError, match=r"client process 1 ended with exit status 1"):
        await SpreadClients(Session(make_target("http://127.0.0.1:1", "m"), S, 0)).start(1, "processes")


class _Stranger:
    name = "client process 1"

    def send(self, frame: bytes) -> None: ...

    async def receive(self) -> bytes | None:
        return encode(Ready("0.0.1-other", "3.11", 1, "far"))

    async def why(self) -> str:
        return "never"

    def kill(self, why: str) -> None: ...

    async def close(self) -> None: ...


class _Mortal(_Stranger):
    """A client process that is killed before it is ready."""

    async def receive(self) -> bytes | None:
        return None

    async def why(self) -> str:
        return "was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize("others", [0, 2])
async def test_the_others_go_on_when_one_is_killed_at_the_start(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def some_die(count: int, on: str) -> list[Any]:
        return [_Mortal(), *(await open_pipes(others, on))]

    monkeypatch.setattr("windtunnel.lab.clients.open_pipes", some_die)
    if not others:
        with pytest.raises(ClientsError, match="was killed by signal 9"):
            await blow(SPREAD)
        return
    result = await blow(SPREAD)
    assert [(one.why, one.requests) for one in result.lost_clients] == [("was killed by signal 9 (SIGKILL)", 0)]
    assert result.untried is not None and "SIGKILL" in result.untried
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}


async def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def strangers(count: int, on: str) -> list[_Stranger]:
        return [_Stranger()]

    monkeypatch.setattr("windtunnel.lab.clients.open_pipes", strangers)
    with pytest.raises(ClientsError, match=r"runs windtunnel 0.0.1-other, this is"):
        await SpreadClients(Session(make_target("http://127.0.0.1:1", "m"), S, 0)).start(1, "processes")


class _Ahead(_Stranger):
    """An end whose clock is an hour ahead."""

    def send(self, frame: bytes) -> None:
        self.asked = decode(frame)

    async def receive(self) -> bytes | None:
        return encode(replace(self.asked, own_ns=time.monotonic_ns() + 3600 * S))


async def test_another_machines_clock_is_measured() -> None:
    assert abs(await _clock_offset_ns(_Peer(_Ahead())) - 3600 * S) < 100 * MS


async def test_a_client_process_ends_with_its_coordinator() -> None:
    (pipe,) = await open_pipes(1, "processes")
    assert isinstance(pipe, ProcessPipe)
    assert await pipe.receive() is not None
    (pid,) = client_processes()
    await pipe.close()
    assert pid not in children()


@pytest.mark.parametrize(
    ("changes", "message"), [({"clients": 0}, "clients: 0 is below 1"), ({"clients": 999}, "over 256"), ({"on": "k8s"}, "on:")]
)
def test_bad_places_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(replace(PLAN, **changes))


def test_the_record_is_one_json_document() -> None:
    assert json.loads(json.dumps(storm_document(asyncio.run(blow(SPREAD)))))["clients"]["processes"] == 3


async def test_client_processes_speak_grpc_too(tmp_path: Path) -> None:
    arm = Arm(command="{python} -m windtunnel serve --model m --port {port} --grpc-port {port2} --ttft 5ms --itl 2ms")
    async with running(arm, tmp_path / "log", time_scale=1.0, seed=0) as server:
        url = f"grpc://127.0.0.1:{server.more_ports[0]}"
        target = make_target(url, "m", metrics_urls=[f"{server.url}/metrics"])
        one, two = await run_storm(target, PLAN), await run_storm(target, replace(PLAN, clients=2))
    assert said(two) == said(one)
    assert find(two) == ()


def said(result: StormResult) -> list[Any]:
    """Who got which whole answer, and who left; tokens that wait in a call merge, so nothing of how many came at once."""
    return sorted(
        [(one.ask.tag, one.end.value, one.left_by, one.words if one.complete else ()) for one in result.streams], key=repr
    )
