"""From a schedule that breaks an invariant to the shortest one.

First delta debugging (Zeller and Hildebrandt, 2002) takes steps away as long as the invariant still breaks; what is left is
*1-minimal*: no single step can go. Then, where the space is small enough, a breadth-first search of all shorter schedules
replaces it by the shortest there is, or shows that none is shorter.
"""

from collections.abc import Callable
from itertools import pairwise

from windtunnel.explore.invariants import Invariant
from windtunnel.explore.machine import Machine
from windtunnel.explore.searches import Judge, Limits, Result, Violation, exhaustive

SHORTEST = "shortest"
ONE_MINIMAL = "1-minimal"

Lanes = tuple[int, ...]
Attempt = Callable[[Lanes], Violation | None]


def shrink(machine: Machine, violation: Violation, limits: Limits) -> Violation:
    """The shortest schedule that breaks the same invariant, within `limits.states`; else a 1-minimal one."""
    small = minimal(violation.before_healing, Attempts(machine, violation.invariant, limits))
    bounded = limits._replace(steps=max(len(small.before_healing) - 1, 0))
    search = exhaustive(machine, bounded, reduce=False, until=violation.invariant)
    if (shorter := search.violations.get(violation.invariant)) is not None:
        return shorter._replace(minimal=SHORTEST)
    return small._replace(minimal=SHORTEST if search.stopped_by in ("", "steps") else ONE_MINIMAL)


def minimal(schedule: Lanes, attempt: Attempt) -> Violation:
    """Delta debugging over a schedule that breaks."""
    best = attempt(schedule)
    if best is None:
        raise AssertionError("the schedule to shrink does not break the invariant")
    pieces = 2
    while best.before_healing:
        length = len(best.before_healing)
        shorter = _without_a_piece(best.before_healing, min(pieces, length), attempt)
        if shorter is not None:
            best, pieces = shorter, max(pieces - 1, 2)
        elif pieces >= length:
            break
        else:
            pieces *= 2
    return best


def _without_a_piece(schedule: Lanes, pieces: int, attempt: Attempt) -> Violation | None:
    for start, stop in pairwise(len(schedule) * piece // pieces for piece in range(pieces + 1)):
        shorter = attempt(schedule[:start] + schedule[stop:])
        if shorter is not None:
            return shorter
    return None


class Attempts:
    """Runs schedules, passing over steps that cannot be taken, until `invariant` breaks."""

    def __init__(self, machine: Machine, invariant: Invariant, limits: Limits) -> None:
        self._machine = machine
        self._invariant = invariant
        self._result = Result("shrink")
        self._judge = Judge(machine, limits, self._result)

    def __call__(self, schedule: Lanes) -> Violation | None:
        self._result.violations.clear()
        machine, state, taken = self._machine, self._machine.initial, list[int]()
        self._judge.state(state, lambda: ())
        self._judge.end(state, lambda: ())
        for lane in schedule:
            outcome = machine.outcome(state, lane)
            if self._invariant in self._result.violations or not outcome.enabled:
                continue
            state = machine.after(state, lane, outcome)
            taken.append(lane)
            self._judge.step(outcome, lambda: tuple(taken))
            self._judge.state(state, lambda: tuple(taken))
            self._judge.end(state, lambda: tuple(taken))
        return self._result.violations.get(self._invariant)
