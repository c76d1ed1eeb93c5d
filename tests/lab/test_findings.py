"""Each defect of the fake server raises its finding, and nothing is found without one."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.lab.conftest import until
from tests.lab.fake_server import DEFECTS, FakeServer
from tests.own_time import own_time

from windtunnel.core.units import MS, S
from windtunnel.lab.connection import How
from windtunnel.lab.document import storm_document
from windtunnel.lab.finding import Finding
from windtunnel.lab.findings import KINDS, find
from windtunnel.lab.plan import METRICS_BYSTANDER, Moment, Role, Shape, StormPlan, Trigger
from windtunnel.lab.record import End, Sample, StormResult
from windtunnel.lab.sampler import Sampler
from windtunnel.lab.session import Session
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target

PLAN = StormPlan(
    victims=4,
    survivors=2,
    bystanders=10,
    later=6,
    victim=Shape(max_tokens=400),
    sample_every_ns=10 * MS,
    quiet_deadline_ns=300 * MS,
    request_timeout_ns=20 * S,
)
PLANS = {
    "stale-gauge": replace(PLAN, bystander_kinds=(METRICS_BYSTANDER,)),
    "deaf": replace(PLAN, quiet_deadline_ns=10 * S),
    "wedge": replace(
        PLAN, request_timeout_ns=1 * S, bystander_kinds=(METRICS_BYSTANDER,), survivors=0, later_concurrency=PLAN.later
    ),
}


async def blow(plan: StormPlan, *defects: str, **options: Any) -> StormResult:
    """In the time of this process: how long deadlines and streams are to one another is no matter of the machine's."""
    server = FakeServer(frozenset(defects), **options)
    port = await server.start()
    try:
        with own_time(asyncio.get_running_loop()):
            return await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan)
    finally:
        await server.stop()


def names(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.name for finding in findings]


@pytest.mark.parametrize(("defect", "finding"), DEFECTS.items())
async def test_defect_raises_its_finding(defect: str, finding: str) -> None:
    found = find(await blow(PLANS.get(defect, PLAN), defect))
    assert finding in names(found)
    assert all(one.evidence and one.count > 0 for one in found)


async def test_clean_server_raises_nothing() -> None:
    result = await blow(PLAN)
    assert find(result) == ()
    assert result.oracle
    assert result.quiet_ns is not None
    assert len(result.bystanders) == PLAN.bystanders
    assert [victim.end for victim in result.of(Role.VICTIM)] == [End.LEFT] * PLAN.victims
    assert all(stream.complete for stream in result.of(Role.SURVIVOR, Role.LATER))


async def test_a_target_without_metrics_is_still_watched_from_its_answers() -> None:
    result = await blow(PLAN, "no-metrics")
    assert find(result) == ()
    assert len(result.bystanders) == PLAN.bystanders
    assert not any(one.harmed for one in result.bystanders)
    assert any("leaks cannot be seen" in note for note in result.notes)
    assert result.samples == ()
    found = names(find(await blow(PLAN, "no-metrics", "short")))
    assert found == ["corrupt_stream"]


@pytest.mark.parametrize("later", [6, 0])
async def test_a_server_that_is_gone_is_unreachable_not_wedged(later: int) -> None:
    result = await blow(replace(PLAN, later=later), "leak-slot")
    probe = next(one for one in reversed(result.streams) if one.ask.role is Role.PROBE)
    streams = tuple(
        replace(one, end=End.REFUSED, status=None, words=(), fault=None)
        if one.ask.role is Role.LATER or (not later and one is probe)
        else one
        for one in result.streams
    )
    gone = replace(result, streams=streams)
    assert "wedged" not in names(find(gone))
    assert (
        "the server no longer accepts connections" in next(one for one in find(gone) if one.name == "unreachable").evidence[0]
    )
    assert set(storm_document(gone)["leaked"].values()) == {None}
    assert "unreachable" not in names(find(result))


async def test_crossed_words_are_traced_to_their_owner() -> None:
    found = {one.name: one for one in find(await blow(PLAN, "crossed"))}
    assert "which belongs to" in found["crossed_stream"].evidence[0]
    assert "[wt:" in found["crossed_stream"].evidence[0].split("which belongs to")[1]


async def test_a_stale_gauge_is_not_called_a_leak() -> None:
    found = names(find(await blow(PLANS["stale-gauge"], "stale-gauge")))
    assert "stale_gauge" in found
    assert not {"slot_leak", "queue_orphan", "kv_leak"} & set(found)


async def test_a_stall_in_the_wait_for_quiet_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock leaps over the whole deadline while samples are few: what they are to witness is still waited for."""
    leap_ns, now_ns, looked = [0], Session.now_ns, []
    monkeypatch.setattr(Session, "now_ns", lambda session: now_ns(session) + leap_ns[0])
    sample = Sampler.sample

    async def leaping(sampler: Sampler) -> Sample:
        taken = await sample(sampler)
        looked.extend([taken] if taken.phase == "quiet" else [])
        leap_ns[0] = 5 * PLAN.quiet_deadline_ns if len(looked) >= 8 else 0
        return taken

    monkeypatch.setattr(Sampler, "sample", leaping)
    result = await blow(PLANS["stale-gauge"], "stale-gauge")
    assert "stale_gauge" in names(find(result))
    assert result.at_deadline is not None and len(looked) > 8


async def test_work_for_nobody_is_not_called_a_leak() -> None:
    found = names(find(await blow(replace(PLAN, victim=Shape(max_tokens=100_000)), "deaf")))
    assert found == ["zombie_tokens"]


@pytest.mark.parametrize("how", [How.FIN, How.RST, How.HALF_CLOSE, How.KILL])
@pytest.mark.parametrize(
    ("when", "state"),
    [
        (Trigger(Moment.INCOMPLETE, 0), "incomplete"),
        (Trigger(Moment.SENT, 0), "sent"),
        (Trigger(Moment.HEAD, 0), "head"),
        (Trigger(Moment.TOKENS, 2), "tokens:2"),
    ],
    ids=str,
)
async def test_victims_leave_in_the_state_that_was_asked_for(how: How, when: Trigger, state: str) -> None:
    plan = replace(PLAN, how=(how,), when=when, linger_ns=200 * MS, bystanders=0, later=0, survivors=0)
    result = await blow(plan, silent_after=when.count)
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {state}
    assert result.quiet_ns is not None
    assert find(result) == ()


async def test_victims_leave_while_queued_when_the_gauge_says_so() -> None:
    server = FakeServer(itl_s=0.001)
    port = await server.start()
    patient = replace(PLAN, bystanders=0, later=0, survivors=0, state_patience_ns=60 * S)
    plan = replace(patient, when=Trigger(Moment.QUEUED, 0), victim=Shape(max_tokens=100_000))
    try:
        storm = asyncio.create_task(run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan))
        await until(lambda: server.running == plan.victims)
        server.waiting = 3
        await until(lambda: server.left == plan.victims)
        server.waiting = 0
        result = await storm
    finally:
        await server.stop()
    assert {(victim.end, victim.left_in) for victim in result.of(Role.VICTIM)} == {(End.LEFT, "queued (inferred)")}


async def test_held_victims_leave_together() -> None:
    result = await blow(replace(PLAN, hold=True), spread_s=0.002)
    victims = result.of(Role.VICTIM)
    last_came = max(victim.frame_ns[PLAN.when.count - 1] for victim in victims)
    assert all(victim.left_ns is not None and victim.left_ns >= last_came for victim in victims)


async def test_non_streaming_victims_leave() -> None:
    plan = replace(PLAN, victim=Shape(max_tokens=100_000, stream=False), when=Trigger(Moment.AFTER, 0, 30 * MS))
    result = await blow(plan)
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"sent"}
    assert find(result) == ()


async def test_stop_ends_the_storm_with_what_there_is() -> None:
    server = FakeServer(itl_s=0.01)
    port = await server.start()
    stop = asyncio.Event()

    def stop_in_storm(event: object) -> None:
        if getattr(event, "phase", "") == "storm":
            stop.set()

    plan = replace(PLAN, victim=Shape(max_tokens=100_000), when=Trigger(Moment.TOKENS, 90_000))
    try:
        result = await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan, stop=stop, on_event=stop_in_storm)
    finally:
        await server.stop()
    assert result.interrupted == "stopped"
    assert result.of(Role.LATER) == ()
    assert find(result) == ()


def test_every_finding_has_a_name_of_its_own_and_a_cause() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.cause for kind in KINDS)
    assert set(DEFECTS.values()) <= {kind.name for kind in KINDS}


async def test_the_calm_begins_when_the_server_has_answered_after_the_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors may have ended before the server has cleaned up: what that costs must not be taken for the calm's own pace."""

    async def never(sampler: Sampler, every_ns: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Sampler, "run", never)
    result = await blow(replace(PLAN, rounds=4, victims=2, survivors=1, calm=1, bystanders=0, later=0))
    turns = [(one, two) for one, two in pairwise(result.phases) if (one.name, two.name) == ("bystanders", "calm")]
    assert turns
    for storm, calm in turns:
        assert any(storm.ended_ns <= sample.at_ns <= calm.started_ns for sample in result.samples)
