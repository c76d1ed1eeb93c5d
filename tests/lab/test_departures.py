"""Every way of leaving, and every state that only the target knows."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.lab.conftest import until
from tests.lab.fake_server import FakeServer
from tests.lab.test_findings import PLAN, blow, names

from windtunnel.core.units import MS, S
from windtunnel.lab.connection import How
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Moment, PlanError, Role, Shape, StormPlan, Trigger, check_plan, start_offsets
from windtunnel.lab.record import End
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target

QUIET = replace(PLAN, bystanders=0, later=2, survivors=0, state_patience_ns=60 * S)


async def test_who_stops_reading_stays_for_a_while() -> None:
    result = await blow(replace(QUIET, how=(How.STOP_READING,), stall_ns=50 * MS))
    victims = result.of(Role.VICTIM)
    assert {victim.left_by for victim in victims} == {"stop-reading"}
    assert all(victim.left_ns and victim.due_ns and victim.left_ns - victim.due_ns >= 50 * MS for victim in victims)
    assert find(result) == ()


async def test_a_timeout_is_tried_again_and_the_last_attempt_stays() -> None:
    plan = replace(QUIET, how=(How.TIMEOUT_RETRY,), retries=2, victim=Shape(max_tokens=40), victims=3)
    result = await blow(plan)
    assert [one.end for one in result.of(Role.VICTIM)] == [End.LEFT] * 6
    retried = result.of(Role.RETRY)
    assert [one.end for one in retried] == [End.FINISHED] * 3
    assert {one.ask.tag for one in retried} == {one.ask.tag for one in result.of(Role.VICTIM)}
    assert len({one.ask.request_id for one in result.of(Role.VICTIM, Role.RETRY)}) == 9
    assert find(result) == ()


async def test_retries_beside_attempts_that_run_on_are_amplified() -> None:
    plan = replace(QUIET, how=(How.TIMEOUT_RETRY,), retries=1, victim=Shape(max_tokens=1000), request_timeout_ns=20 * S)
    assert "retry_storm_amplified" in names(find(await blow(plan, "deaf")))


async def test_an_abort_by_id_ends_the_stream_as_aborted() -> None:
    result = await blow(replace(QUIET, how=(How.ABORT_ID,), linger_ns=20 * S))
    assert {victim.finish_reason for victim in result.of(Role.VICTIM)} == {"abort"}
    assert result.notes == ()
    assert find(result) == ()


async def test_an_aborted_bystander_is_called_so() -> None:
    assert "collateral_abort" in names(find(await blow(PLAN, "abort-others")))


@pytest.mark.parametrize(
    ("moment", "state"),
    [
        (Moment.QUEUED, "deferred"),
        (Moment.PREFILL, "prefill"),
        (Moment.DECODE, "decode"),
        (Moment.TRANSFER, "transferring"),
        (Moment.BETWEEN, "inflight"),
        (Moment.BETWEEN, "held"),
    ],
)
async def test_states_are_read_where_the_target_shows_them(moment: Moment, state: str) -> None:
    server = FakeServer(itl_s=0.001, debug=True)
    port = await server.start()
    plan = replace(QUIET, when=Trigger(moment, 0), victim=Shape(max_tokens=100_000))
    try:
        storm = asyncio.create_task(run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan))
        await until(lambda: server.running == plan.victims)
        ids = {f"cmpl-{one}-0-x": state for one in server.ids.values()}
        server.live, server.held = ({}, list(ids)) if state == "held" else (ids, [])
        result = await storm
    finally:
        await server.stop()
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {moment.value}


async def test_a_router_may_give_requests_other_ids() -> None:
    """Then the prompt's marker tells whose state it is, and an entry of anybody else's says nothing."""
    server = FakeServer(itl_s=0.001, debug=True)
    port = await server.start()
    plan = replace(QUIET, when=Trigger(Moment.PREFILL, 0), victim=Shape(max_tokens=100_000))
    try:
        storm = asyncio.create_task(run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan))
        await until(lambda: server.running == plan.victims)
        first, *others = [{"external_id": f"chatcmpl-{one:x}", "identity": f"{one:016x}"} for one in server.identities[1:]]
        server.shown = [first | {"state": "queued"}, *({**one, "state": "prefill"} for one in others)]
        await until(lambda: server.left == plan.victims - 1)
        server.shown = [first | {"state": "prefill"}]
        result = await storm
    finally:
        await server.stop()
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"prefill"}


async def test_patience_for_a_state_ends() -> None:
    server = FakeServer(itl_s=0.001, debug=True)
    port = await server.start()
    plan = replace(QUIET, when=Trigger(Moment.PREFILL, 0), victim=Shape(max_tokens=100_000), state_patience_ns=1 * MS)
    try:
        result = await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan)
    finally:
        await server.stop()
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"prefill (not seen)"}


async def test_an_inferred_state_says_so() -> None:
    server = FakeServer(itl_s=0.001)
    port = await server.start()
    plan = replace(QUIET, when=Trigger(Moment.PREFILL, 0), victim=Shape(max_tokens=100_000))
    try:
        result = await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan)
    finally:
        await server.stop()
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"prefill (inferred)"}


async def test_just_before_the_end_is_so_many_tokens_before_the_last() -> None:
    result = await blow(replace(QUIET, when=Trigger(Moment.END, 2), victim=Shape(max_tokens=12)))
    assert {victim.left_in for victim in result.of(Role.VICTIM)} == {"tokens:10"}


async def test_moments_and_ways_take_turns() -> None:
    plan = replace(QUIET, how=(How.FIN, How.RST), when=Trigger(Moment.TOKENS, 1), also=(Trigger(Moment.SENT, 0),))
    result = await blow(plan, itl_s=0.02)
    seen = {(victim.left_by, (victim.left_in or "")[:4]) for victim in result.of(Role.VICTIM)}
    assert seen == {("fin", "toke"), ("rst", "toke"), ("fin", "sent"), ("rst", "sent")}


async def test_the_same_id_is_sent_by_all() -> None:
    server = FakeServer()
    port = await server.start()
    try:
        await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), replace(QUIET, same_id=True))
    finally:
        await server.stop()
    assert server.seen_ids.count("wt-same-0") == QUIET.victims


async def test_a_soak_repeats_rounds_until_its_time_or_the_limit() -> None:
    plan = replace(QUIET, soak_ns=60 * S, limits=replace(QUIET.limits, max_requests=40))
    result = await blow(plan)
    assert len({victim.ask.round for victim in result.of(Role.VICTIM)}) > 1
    assert any("limit of requests" in note for note in result.notes)


def test_ramps_grow_denser_and_bursts_come_in_groups() -> None:
    offsets = start_offsets(StormPlan(victims=5, ramp_ns=400 * MS))
    assert offsets[0] == 0 and offsets[-1] == 400 * MS
    gaps = [two - one for one, two in pairwise(offsets)]
    assert gaps == sorted(gaps, reverse=True)
    assert start_offsets(StormPlan(victims=4, burst=2, burst_gap_ns=7)) == [0, 0, 7, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"when": Trigger(Moment.END, 300)}, "not within the 256 tokens"),
        ({"hold": True, "ramp_ns": S}, "hold: all victims wait"),
        ({"how": (How.ABORT_ID,), "when": Trigger(Moment.INCOMPLETE, 0)}, "no request to abort"),
        ({"victim": Shape(n=0)}, "victim.n: 0"),
        ({"retries": 0}, "retries: 0 is below 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(replace(StormPlan(), **changes))  # type: ignore[arg-type]
