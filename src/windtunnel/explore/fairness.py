"""The liveness phase: the faults stop, everybody else gets turn after turn, and the end must be good.

Turns go round robin, which is fair and deterministic: from a state and a lane whose turn it is, there is one future. It
ends in a state where nothing can move, or in a loop. `@eventually` asks that the invariant holds at that rest, or somewhere
in that loop.
"""

from collections.abc import Sequence
from typing import NamedTuple

from windtunnel.explore.machine import Machine, State
from windtunnel.explore.model import Check


class Turn(NamedTuple):
    state: State
    lane: int
    """Whose turn it is; who cannot move is passed over."""


class LivenessPhase:
    """Owned by one search: it remembers the end of every future it has seen."""

    def __init__(self, machine: Machine, turns_max: int) -> None:
        self._machine = machine
        self._turns_max = turns_max
        self._ends: dict[Turn, frozenset[int]] = {}
        self.undecided = False
        """Some future was longer than `turns_max` and was given up."""

    def broken(self, state: State) -> list[Check]:
        """The `@eventually` checks that fail from `state` on."""
        if not self._machine.eventually:
            return []
        failing = self._end_of(Turn(state, 0))
        return [check for index, check in enumerate(self._machine.eventually) if index in failing]

    def schedule(self, state: State) -> list[int]:
        """The lanes that run, up to the rest or once through the loop."""
        lanes: list[int] = []
        seen: set[Turn] = set()
        turn = Turn(state, 0)
        while turn not in seen and len(lanes) < self._turns_max:
            seen.add(turn)
            moved = self._next(turn)
            if moved is None:
                break
            lane, turn = moved
            lanes.append(lane)
        return lanes

    def _end_of(self, turn: Turn) -> frozenset[int]:
        path: dict[Turn, int] = {}
        while turn not in self._ends and turn not in path and len(path) < self._turns_max:
            path[turn] = len(path)
            moved = self._next(turn)
            if moved is None:
                self._ends[turn] = self._failing([turn.state])
                break
            turn = moved[1]
        else:
            if turn in path:
                self._ends[turn] = self._failing([known.state for known in list(path)[path[turn] :]])
            elif turn not in self._ends:
                self.undecided = True
                return frozenset()
        end = self._ends[turn]
        self._ends.update(dict.fromkeys(path, end))
        return end

    def _next(self, turn: Turn) -> tuple[int, Turn] | None:
        machine, count = self._machine, len(self._machine.lanes)
        for lane in (*range(turn.lane, count), *range(turn.lane)):
            if machine.faults >> lane & 1:
                continue
            outcome = machine.outcome(turn.state, lane)
            if outcome.enabled:
                return lane, Turn(machine.after(turn.state, lane, outcome), (lane + 1) % count)
        return None

    def _failing(self, states: Sequence[State]) -> frozenset[int]:
        """Indices of the checks that hold in none of `states`."""
        checks = self._machine.eventually
        broken = [{id(check) for check in self._machine.broken(state, checks)} for state in states]
        return frozenset(index for index, check in enumerate(checks) if all(id(check) in each for each in broken))
