"""Plans that must not run, and why."""

from dataclasses import replace

import pytest
from tests.lab.fake_server import FakeServer

from windtunnel.lab.dry_run import describe, planned_asks
from windtunnel.lab.plan import (
    Limits,
    Moment,
    PlanError,
    Shape,
    StormPlan,
    Trigger,
    check_plan,
    check_target_allowed,
    parse_hows,
    parse_trigger,
)
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target


@pytest.mark.parametrize("text", ["incomplete", "sent", "queued", "head", "tokens:3", "after:50ms"])
def test_triggers_read_back(text: str) -> None:
    assert str(parse_trigger(text)) == text


@pytest.mark.parametrize("text", ["", "tokens", "tokens:0", "tokens:x", "after:5", "sent:3", "never"])
def test_bad_triggers_are_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(PlanError, match="none of incomplete, sent"):
        parse_trigger(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"victims": -1}, "victims: -1 is below 0"),
        ({"rounds": 0}, "rounds: 0 is below 1"),
        ({"victims": 3_000}, "--max-requests"),
        ({"victims": 300}, "--max-concurrency"),
        ({"victim": Shape(max_tokens=0)}, "victim.max_tokens"),
        ({"victim": Shape(stream=False)}, "needs a streaming victim"),
        ({"oracle": "perhaps"}, "oracle"),
        ({"how": ()}, "how"),
        ({"bystander_kinds": ()}, "bystander_kinds"),
        ({"hold": True, "victim_concurrency": 2}, "hold"),
    ],
)
def test_bad_plans_name_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(replace(StormPlan(), **changes))


def test_limits_can_be_raised() -> None:
    check_plan(StormPlan(victims=3_000, limits=Limits(max_requests=10_000, max_concurrency=5_000)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_may_be_stormed(host: str) -> None:
    check_target_allowed(host, owned=False)


@pytest.mark.parametrize("host", ["10.0.0.1", "api.example", "localhost.example", "0.0.0.0"])
def test_other_machines_need_the_owners_word(host: str) -> None:
    with pytest.raises(PlanError, match="--i-own-this-target"):
        check_target_allowed(host, owned=False)
    check_target_allowed(host, owned=True)


def test_hows() -> None:
    assert [how.value for how in parse_hows("fin, rst,half-close")] == ["fin", "rst", "half-close"]
    with pytest.raises(PlanError, match="comma list"):
        parse_hows("shout")


def test_the_same_seed_asks_the_same() -> None:
    plan = StormPlan(seed=5, survivors=2)
    assert list(planned_asks(plan)) == list(planned_asks(plan))
    assert list(planned_asks(plan)) != list(planned_asks(replace(plan, seed=6)))
    tags = [ask.tag for ask in planned_asks(plan)]
    assert len(set(tags)) == len(tags)


async def test_the_dry_run_shows_what_is_sent() -> None:
    server = FakeServer()
    port = await server.start()
    plan = StormPlan(victims=1, bystanders=0, later=0, victim=Shape(max_tokens=50), when=Trigger(Moment.TOKENS, 1))
    target = make_target(f"http://127.0.0.1:{port}", "fake")
    try:
        result = await run_storm(target, plan)
    finally:
        await server.stop()
    shown = describe(target, plan)
    assert all(f"[wt:{stream.ask.tag:x}]" in shown for stream in result.streams)
