"""Three ways to look for a schedule that breaks an invariant.

* `exhaustive`: every schedule, up to equivalence. States are hashed, so each is expanded once; *sleep sets* (Godefroid, 1996)
  leave out a step whose effect is seen on another path. They leave out steps, never states, so `@always` in every state
  and `@eventually` from every state are still decided. The proof needs one care where states are hashed: see `_Frontier.visit`.
* `random_walks`: a seeded coin at every step. Finds what many schedules find.
* `pct_walks`: probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): random priorities, and `depth - 1`
  random moments at which the running process falls to the lowest. A bug that needs `depth` ordered steps among n
  processes and k steps is found by one schedule with probability at least 1 / (n · k^(depth-1)).
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from windtunnel.explore.fairness import LivenessPhase
from windtunnel.explore.invariants import NO_STEP_FAILS, Invariant
from windtunnel.explore.machine import Machine, Outcome, State


class Limits(NamedTuple):
    """Every search ends. `steps` is the length of a schedule without its liveness phase."""

    schedules: int = 2_000
    steps: int = 200
    states: int = 500_000
    seconds: float = 60.0
    turns: int = 2_000


class Violation(NamedTuple):
    """A schedule that breaks an invariant. `healed_at`: the step at which the faults stop, for an `@eventually`."""

    invariant: Invariant
    schedule: tuple[int, ...]
    healed_at: int | None = None
    minimal: str = ""

    @property
    def before_healing(self) -> tuple[int, ...]:
        return self.schedule[: self.healed_at]


@dataclass
class Result:
    """What a search did. `complete`: the whole space of the model was seen, and no limit was met.

    `schedules` are the paths walked, each to a rest, to a limit, or to a state from which all is known.
    """

    search: str
    schedules: int = 0
    states: int = 0
    transitions: int = 0
    depth: int = 0
    complete: bool = False
    stopped_by: str = ""
    violations: dict[Invariant, Violation] = field(default_factory=dict)


Path = Callable[[], tuple[int, ...]]
"""The schedule that leads here, worked out only if it is wanted."""


class Judge:
    """Looks at states and steps as a search meets them, and files the violations. One for each search."""

    def __init__(self, machine: Machine, limits: Limits, result: Result) -> None:
        self._machine = machine
        self._result = result
        self.liveness = LivenessPhase(machine, limits.turns)

    def state(self, state: State, path: Path) -> None:
        for check in self._machine.broken(state, self._machine.always):
            self._file(check.invariant, path, None)

    def end(self, state: State, path: Path) -> None:
        for check in self.liveness.broken(state):
            self._file(check.invariant, path, state)

    def step(self, outcome: Outcome, path: Path) -> None:
        if outcome.failure is not None:
            self._file(NO_STEP_FAILS, path, None)

    def _file(self, invariant: Invariant, path: Path, healed: State | None) -> None:
        """The first of each invariant counts."""
        if invariant in self._result.violations:
            return
        schedule = path()
        ending = () if healed is None else tuple(self.liveness.schedule(healed))
        self._result.violations[invariant] = Violation(invariant, schedule + ending, None if healed is None else len(schedule))


Seen = Literal["new", "again", "known"]
"""Of a state that a search comes to: it is new, it has more to explore than was thought, or nothing is left to do."""


class Visit(NamedTuple):
    """One visit of a state: explore the lanes `todo`; the lanes `sleep` are explored elsewhere."""

    state: State
    todo: int
    sleep: int


class _Frontier:
    """The states seen, how each was first reached, and what is still to be expanded. Breadth first."""

    def __init__(self) -> None:
        self.parents: dict[State, tuple[State, int] | None] = {}
        self.depths: dict[State, int] = {}
        self.queue: deque[Visit] = deque()
        self._sleeping: dict[State, int] = {}

    def visit(self, state: State, sleep: int, parent: tuple[State, int] | None) -> Seen:
        """Come to `state` with the lanes `sleep` asleep.

        At a second visit, the lanes that slept at all visits before and do not sleep at this one are explored, with only those
        asleep that have slept at every visit. With more of them asleep (those explored at an earlier visit, as in a search
        without hashing) two independent steps could each wait for the other.
        """
        before = self._sleeping.get(state)
        if before is None:
            self.parents[state] = parent
            self.depths[state] = 0 if parent is None else self.depths[parent[0]] + 1
            self._sleeping[state] = sleep
            self.queue.append(Visit(state, ~sleep, sleep))
            return "new"
        if not before & ~sleep:
            return "known"
        self._sleeping[state] = before & sleep
        self.queue.append(Visit(state, before & ~sleep, before & sleep))
        return "again"

    def path(self, state: State) -> tuple[int, ...]:
        lanes: list[int] = []
        came = self.parents[state]
        while came is not None:
            lanes.append(came[1])
            came = self.parents[came[0]]
        return tuple(reversed(lanes))


def exhaustive(machine: Machine, limits: Limits, reduce: bool = True, until: Invariant | None = None) -> Result:
    """Every state within the limits, nearest first; or until `until` is broken. Deterministic."""
    result = Result("exhaustive")
    judge, frontier, deadline = Judge(machine, limits, result), _Frontier(), time.monotonic() + limits.seconds
    frontier.visit(machine.initial, 0, None)
    _meet(judge, frontier, machine.initial)
    while frontier.queue and until not in result.violations:
        if exhausted := _exhausted(frontier, limits, deadline):
            result.stopped_by = exhausted
            break
        visit = frontier.queue.popleft()
        if frontier.depths[visit.state] >= limits.steps:
            result.stopped_by = "steps"
            continue
        _expand(machine, frontier, judge, result, visit, reduce)
    result.states, result.depth = len(frontier.parents), max(frontier.depths.values())
    if judge.liveness.undecided:
        result.stopped_by = result.stopped_by or "turns"
    result.complete = not result.stopped_by
    return result


def _expand(machine: Machine, frontier: _Frontier, judge: Judge, result: Result, visit: Visit, reduce: bool) -> None:
    """Take every step of a visit. Lanes asleep here, or taken before, sleep on behind a step that they do not touch."""
    moves = dict(machine.enabled(visit.state))
    asleep = [lane for lane in moves if visit.sleep >> lane & 1]
    result.schedules += not any(visit.todo >> lane & 1 for lane in moves)
    for lane, outcome in moves.items():
        if not visit.todo >> lane & 1:
            continue
        after = machine.after(visit.state, lane, outcome)
        sleep = sum(1 << other for other in asleep if moves[other].independent_of(outcome)) if reduce else 0
        result.transitions += 1
        seen = frontier.visit(after, sleep, (visit.state, lane))
        judge.step(outcome, lambda state=visit.state, lane=lane: (*frontier.path(state), lane))  # type: ignore[misc]
        if seen == "new":
            _meet(judge, frontier, after)
        result.schedules += seen == "known"
        asleep.append(lane)


def _meet(judge: Judge, frontier: _Frontier, state: State) -> None:
    judge.state(state, lambda: frontier.path(state))
    judge.end(state, lambda: frontier.path(state))


def _exhausted(frontier: _Frontier, limits: Limits, deadline: float) -> str:
    if len(frontier.parents) > limits.states:
        return "states"
    return "seconds" if time.monotonic() > deadline else ""


Choose = Callable[[list[int], int], int]
"""(lanes that can move, number of the step) → the lane that moves."""


def random_walks(machine: Machine, limits: Limits, seed: int) -> Result:
    chance = random.Random(seed)
    return _walks("random", machine, limits, chance, lambda _length: lambda lanes, _step: chance.choice(lanes))


def pct_walks(machine: Machine, limits: Limits, seed: int, depth: int = 3) -> Result:
    chance = random.Random(seed)
    return _walks("pct", machine, limits, chance, lambda length: _priorities(chance, len(machine.lanes), depth, length))


def _priorities(chance: random.Random, lanes: int, depth: int, length: int) -> Choose:
    """PCT: the highest priority runs; at change point i the process that would run falls to priority i."""
    order = list(range(depth, depth + lanes))
    chance.shuffle(order)
    changes = {chance.randrange(max(length, 1)): low for low in range(depth - 1)}

    def choose(able: list[int], step: int) -> int:
        first = max(able, key=order.__getitem__)
        if step in changes:
            order[first] = changes.pop(step)
            first = max(able, key=order.__getitem__)
        return first

    return choose


def _walks(name: str, machine: Machine, limits: Limits, chance: random.Random, strategy: Callable[[int], Choose]) -> Result:
    """`limits.schedules` walks, each with a random subset of the faults. A walk's length sets the change points of the next."""
    result, deadline, length = Result(name), time.monotonic() + limits.seconds, limits.steps
    judge = Judge(machine, limits, result)
    seen: set[State] = set()
    while result.schedules < limits.schedules:
        if time.monotonic() > deadline:
            result.stopped_by = "seconds"
            break
        silent = machine.faults & chance.getrandbits(len(machine.lanes))
        steps = 0
        for state in _walk(machine, limits, judge, strategy(length), silent):
            seen.add(state)
            steps += 1
        length = max(steps, 1) if length == limits.steps else max(length, steps)
        result.depth = max(result.depth, steps)
        result.schedules += 1
        result.transitions += steps
    result.states = len(seen)
    result.stopped_by = result.stopped_by or "schedules"
    return result


def _walk(machine: Machine, limits: Limits, judge: Judge, choose: Choose, silent: int) -> Iterator[State]:
    """One schedule to its rest or to the limit, then the liveness phase."""
    state, taken = machine.initial, list[int]()
    judge.state(state, lambda: tuple(taken))
    for step in range(limits.steps):
        moves = {lane: outcome for lane, outcome in machine.enabled(state) if not silent >> lane & 1}
        if not moves:
            break
        lane = choose(list(moves), step)
        state = machine.after(state, lane, moves[lane])
        taken.append(lane)
        judge.step(moves[lane], lambda: tuple(taken))
        judge.state(state, lambda: tuple(taken))
        yield state
    judge.end(state, lambda: tuple(taken))
