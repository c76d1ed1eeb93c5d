"""Time that a busy machine takes away does not count."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.own_time import OwnTime, own_time
from windtunnel.lab.session import Session
from windtunnel.lab.target import make_target
from windtunnel.serve import clock

MS = 1_000_000


def test_a_wait_counts_for_no_longer_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_ns = 0

    def late(_timeout: float | None) -> list[Any]:
        nonlocal wall_ns
        wall_ns += 300 * MS
        return []

    told = SimpleNamespace(monotonic_ns=lambda: wall_ns, thread_time_ns=lambda: 0)
    monkeypatch.setattr("tests.own_time.time", told)
    own = OwnTime(SimpleNamespace(_selector=SimpleNamespace(select=late)))
    for timeout, counted in ((0.005, 5), (0, 5), (1.0, 305), (None, 605)):
        own.select(timeout)
        assert own.now_ns() == counted * MS


def test_a_turn_counts_for_what_it_computes_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_ns = 0
    told = SimpleNamespace(monotonic_ns=lambda: 0, thread_time_ns=lambda: cpu_ns)
    monkeypatch.setattr("tests.own_time.time", told)
    own = OwnTime(SimpleNamespace(_selector=SimpleNamespace(select=lambda _timeout: [])))
    for worked, counted in ((30, 30), (5000, 130), (7, 137)):
        cpu_ns += worked * MS
        assert own.now_ns() == counted * MS
        own.select(0)
        assert own.now_ns() == counted * MS


async def test_loop_servers_and_lab_have_one_clock() -> None:
    loop, real = asyncio.get_running_loop(), clock.now_ns
    with own_time(loop) as own:
        session = Session(make_target("http://127.0.0.1:1", "m"), 1, 1)
        before_ns = own.now_ns()
        await asyncio.sleep(0.01)
        for now_ns in (clock.now_ns(), round(loop.time() * 1e9), session.start_ns + session.now_ns()):
            assert before_ns + 10 * MS <= now_ns <= own.now_ns()
    assert clock.now_ns is real
