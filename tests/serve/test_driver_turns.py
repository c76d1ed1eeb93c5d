"""When the driver wakes: dense deadlines share a turn, lone ones and overdue ones do not wait."""

from typing import Any

import pytest

from windtunnel.serve import driver as module
from windtunnel.serve.driver import EngineDriver


class FakeAlarm:
    def __init__(self) -> None:
        self.times: list[int] = []

    def set(self, at_ns: int) -> None:
        self.times.append(at_ns)


class FakeEngine:
    """Has events at given times; `advance` takes those that are due and takes no time."""

    def __init__(self, events: list[int]) -> None:
        self.events = events

    def next_event_at(self) -> int | None:
        return self.events[0] if self.events else None

    def advance(self, now_ns: int) -> list[Any]:
        self.events = [at for at in self.events if at > now_ns]
        return []


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
        engine = FakeEngine([self.now + at for at in events])
        self.driver = EngineDriver(engine, 0, self.loop, FakeCork(), ())  # type: ignore[arg-type]

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
