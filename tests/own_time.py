"""Time of the process itself: what it has waited and computed. What a busy machine takes away does not count.

Servers, clients and the lab of a test that live in one event loop keep their pace to one another on any machine: a lease, a gap
or a transfer is as long as ever by the work that can be done in it. Other processes are not part of it.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.explore.deterministic import virtual_clock
from windtunnel.faults import blocking_cleanup
from windtunnel.lab.session import Session

LONGEST_TURN_NS = 100_000_000
"""A turn of the loop counts for no more: the collector at a big heap, or what a hypervisor books as ours, is no test's time."""


class OwnTime:
    """The clock of one event loop: waits, each for no longer than was asked for, and the thread's processor time."""

    def __init__(self, loop: Any) -> None:
        self._select = loop._selector.select
        self._turned_ns = time.thread_time_ns()
        self._at_turn_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        return self._at_turn_ns + min(max(time.thread_time_ns() - self._turned_ns, 0), LONGEST_TURN_NS)

    def time(self) -> float:
        return self.now_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        """What blocks the loop takes no time but its own."""
        self._at_turn_ns += round(seconds * 1e9)

    def select(self, timeout: float | None = None) -> Any:
        self._at_turn_ns = self.now_ns()
        since_ns = time.monotonic_ns()
        events = self._select(timeout)
        took_ns = time.monotonic_ns() - since_ns
        self._at_turn_ns += took_ns if timeout is None else min(took_ns, round(max(timeout, 0) * 1e9))
        self._turned_ns = time.thread_time_ns()
        return events


@contextmanager
def own_time(loop: asyncio.AbstractEventLoop) -> Iterator[OwnTime]:
    """Timers of the loop, the servers' clock and the lab's are of this time."""
    own, told = OwnTime(loop), pytest.MonkeyPatch()
    post_init = Session.__post_init__

    def begin(session: Session) -> None:
        post_init(session)
        session.start_ns = own.now_ns()

    with told.context() as patch, virtual_clock(loop):
        patch.setattr(blocking_cleanup, "time", SimpleNamespace(sleep=own.sleep))
        patch.setattr(loop._selector, "select", own.select)  # type: ignore[attr-defined]
        patch.setattr(loop, "time", own.time)
        patch.setattr(Session, "__post_init__", begin)
        patch.setattr(Session, "now_ns", lambda session: own.now_ns() - session.start_ns)
        yield own
