"""When the driver wakes: dense deadlines share a turn, lone ones and overdue ones do not wait."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from windtunnel.core.outputs import StepOutput, TokenOutput
from windtunnel.core.pacing import Duration, Pacing, RequestPacing, StepPacing, is_instant
from windtunnel.serve import driver as module
from windtunnel.serve.driver import EngineDriver


class FakeAlarm:
    def __init__(self) -> None:
        self.times: list[int] = []

    def set(self, at_ns: int) -> None:
        self.times.append(at_ns)


class FakeEngine:
    """Has events at given times; `advance` takes those that are due, and whatever time `after` lets pass."""

    def __init__(self, events: list[int], after: Callable[[], None]) -> None:
        self.events = events
        self.at_once = 0
        """So many further steps are each due at the instant of the one before."""
        self.outputs = 1
        """What each step makes."""
        self.ran: list[int] = []
        self._after = after

    def next_event_at(self) -> int | None:
        return self.events[0] if self.events else None

    def advance(self, now_ns: int) -> list[StepOutput]:
        self.events = [at for at in self.events if at > now_ns]
        if self.at_once:
            self.at_once -= 1
            self.events.insert(0, now_ns)
        self.ran.append(now_ns)
        self._after()
        return [StepOutput(now_ns, [TokenOutput("r", (1,))] * self.outputs)]


class FakeCork:
    active = False

    def release(self) -> None:
        self.active = False


class FakeLoop:
    def __init__(self) -> None:
        self.soon = 0

    def call_soon(self, _callback: Any) -> None:
        self.soon += 1


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: list[int]) -> None:
        self.now = 1_000_000
        self.alarm, self.loop = FakeAlarm(), FakeLoop()
        monkeypatch.setattr(module, "now_ns", lambda: self.now)
        monkeypatch.setattr(module, "make_alarm", lambda _loop, _callback: self.alarm)
        self.takes_ns = 0
        """What each step takes."""
        self.engine = FakeEngine([self.now + at for at in events], self._pass)
        self.driver = EngineDriver(self.engine, 0, self.loop, FakeCork(), ())  # type: ignore[arg-type]

    def _pass(self) -> None:
        self.now += self.takes_ns

    def turns(self, count: int) -> list[int]:
        """Times of the next alarms, relative to the start, each answered when it rings."""
        for _ in range(count):
            self.driver.wake()
            self.now = self.alarm.times[-1]
            self.driver._run()
        return [at - 1_000_000 for at in self.alarm.times]


def test_deadlines_close_to_a_turn_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, [50_000, 60_000, 90_000, 240_000, 260_000, 5_000_000])
    assert rig.turns(1)[0] == 50_000
    assert rig.alarm.times[-1] - 1_000_000 == 250_000
    assert rig.turns(1)[-1] == 450_000
    assert rig.turns(1)[-1] == 5_000_000


def test_what_is_overdue_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, [50_000, 60_000])
    rig.turns(1)
    rig.now += 20_000
    rig.driver.wake()
    assert rig.loop.soon == 1


def test_what_falls_due_during_a_turn_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of a turn are not sent before it ends: a step more would make them late."""
    rig = Rig(monkeypatch, [0, 30_000, 5_000_000])
    rig.takes_ns, rig.engine.at_once = 50_000, 1
    rig.driver._run()
    assert (rig.engine.ran, rig.loop.soon) == ([1_000_000], 1)
    rig.driver._run()
    assert (rig.engine.ran, rig.loop.soon) == ([1_000_000, 1_050_000], 1)


def test_steps_of_an_engine_as_fast_as_possible_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write for each step of each stream would be most of its work."""
    rig = Rig(monkeypatch, [0, 5_000_000])
    rig.driver.front(StepPacing(0, 0, 0), random.Random(0))
    rig.takes_ns, rig.engine.at_once = 50_000, 3
    rig.driver._run()
    assert rig.engine.ran == [1_000_000, 1_050_000, 1_100_000, 1_150_000]
    assert rig.loop.soon == 0


def test_a_step_that_makes_nothing_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is computed in many steps at one instant: others must not wait for all of them."""
    rig = Rig(monkeypatch, [0, 5_000_000])
    rig.driver.front(StepPacing(0, 0, 0), random.Random(0))
    rig.takes_ns, rig.engine.at_once, rig.engine.outputs = 50_000, 3, 0
    for turns in (1, 2, 3):
        rig.driver._run()
        assert (len(rig.engine.ran), rig.loop.soon) == (turns, turns)


@pytest.mark.parametrize(
    ("pacing", "instant"),
    [
        (StepPacing(0, 0, 0), True),
        (StepPacing(0, 1000, 0), True),
        (StepPacing(0, 0, 1), False),
        (StepPacing(1, 0, 0), False),
        (RequestPacing(random.Random(0), ttft=Duration(1)), True),
        (RequestPacing(random.Random(0), itl=Duration(1)), False),
        (RequestPacing(random.Random(0), itl=Duration(1), time_scale=0), True),
    ],
)
def test_which_pacing_is_as_fast_as_possible(pacing: Pacing, instant: bool) -> None:
    assert is_instant(pacing) is instant
