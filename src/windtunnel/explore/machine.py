"""A model as a table that fills itself in.

A step is a pure function of the point where its process stands and of the shared values that it reads. So a step runs as
Python once for each combination of these, and is from then on a walk through a small decision tree: *which variable does it
read first? with this value, which one next? … then it writes these, and its process stands there*. States are plain tuples,
hashable, cheap to keep and to go back to, although the processes are generators, which Python cannot copy.

Two histories of a process lead to the same point when the generator stands at the same yield with equal local variables.
That says all about a generator only if nothing else is alive in its frame, so `_tells_all` looks at its source: a yield within
`for`, `with`, `match`, `except` or `finally`, or in the middle of an expression, keeps the histories apart. That costs
merging, never truth.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from windtunnel.explore.model import Check, Guard, Model, ModelError, Process, Step, Steps, Tape, told

POINTS_MAX = 200_000
NAME_MAX = 120


class State(NamedTuple):
    """The whole world between two steps: the shared values, and the point of each process by number."""

    shared: tuple[Hashable, ...]
    points: tuple[int, ...]


class Outcome(NamedTuple):
    """What a step does. `reads` and `writes` are bit masks over variables; a condition that fails has `enabled` False."""

    enabled: bool
    reads: int
    writes: int
    effect: tuple[tuple[int, Hashable], ...] = ()
    point: int = -1
    failure: str | None = None

    def independent_of(self, other: "Outcome") -> bool:
        """Neither writes what the other reads or writes: in either order both do the same and lead to the same state."""
        return not (self.writes & (other.reads | other.writes) or other.writes & self.reads)


class Ask(NamedTuple):
    """A node of a decision tree: what comes next depends on this variable's value."""

    variable: int
    branches: "dict[Hashable, Ask | Outcome]"


class Point:
    """Where a process stands. Its generator is parked there and never advanced; copies are made by running its history."""

    __slots__ = ("answers", "generator", "guard", "label", "lane", "parent", "tree")

    def __init__(
        self, lane: int, step: Step | None, generator: Steps, parent: "Point | None", answers: Mapping[int, Any]
    ) -> None:
        self.lane = lane
        self.label, self.guard = _label_and_guard(step)
        self.generator = generator
        self.parent = parent
        self.answers = answers
        self.tree: Ask | Outcome | None = ENDED if step is None else None


ENDED = Outcome(False, 0, 0)


class Machine:
    """Executes one model. Owns it, its generators and their points."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.lanes: tuple[Process, ...] = model.processes()
        self.always: tuple[Check, ...] = model.checks("always")
        self.eventually: tuple[Check, ...] = model.checks("eventually")
        self.variables: tuple[str, ...] = tuple(model.variables)
        self.faults = sum(1 << lane for lane, process in enumerate(self.lanes) if process.fault)
        self.python_steps = 0
        self._points: list[Point] = []
        self._numbers: dict[Hashable, int] = {}
        self.initial = State(self._begin(), tuple(self._set_out(lane) for lane in range(len(self.lanes))))

    def outcome(self, state: State, lane: int) -> Outcome:
        """What the next step of `lane` does in `state`."""
        point = self._points[state.points[lane]]
        node: Ask | Outcome | None = point.tree
        while type(node) is Ask:
            node = node.branches.get(state.shared[node.variable])
        return node if type(node) is Outcome else self._learn(point, state.shared)

    def after(self, state: State, lane: int, outcome: Outcome) -> State:
        """The state after an enabled step."""
        shared = list(state.shared)
        for index, value in outcome.effect:
            shared[index] = value
        points = (*state.points[:lane], outcome.point, *state.points[lane + 1 :])
        return State(tuple(shared), points)

    def enabled(self, state: State) -> Iterator[tuple[int, Outcome]]:
        for lane in range(len(self.lanes)):
            outcome = self.outcome(state, lane)
            if outcome.enabled:
                yield lane, outcome

    def label(self, state: State, lane: int) -> str:
        """The name of the next step of `lane`; "" when it has ended."""
        return self._points[state.points[lane]].label

    def broken(self, state: State, checks: Sequence[Check]) -> list[Check]:
        """The checks that do not hold in `state`."""
        tape = self._use(Tape(state.shared))
        try:
            found = [check for check in checks if not check.holds(self.model)]
        except Exception as error:
            raise ModelError(f"an invariant raised {told(error)}") from error
        if tape.writes:
            raise ModelError("an invariant writes shared state")
        return found

    def view(self, state: State) -> Mapping[str, Hashable]:
        return dict(zip(self.variables, state.shared, strict=True))

    def _begin(self) -> tuple[Hashable, ...]:
        initial = [variable.initial for variable in self.model.variables.values()]
        tape = self._use(Tape(initial))
        self.model.begin()
        return tuple(tape.writes.get(index, value) for index, value in enumerate(initial))

    def _set_out(self, lane: int) -> int:
        generator, step = self._restart(lane)
        return self._arrive(Point(lane, step, generator, None, {}))

    def _restart(self, lane: int) -> tuple[Steps, Step | None]:
        tape = self._use(Tape(()))
        generator = self.lanes[lane].start(self.model)
        try:
            step = _next(generator)
        except IndexError:
            raise ModelError(f"{self.lanes[lane].name} reads shared state before its first yield") from None
        if tape.writes:
            raise ModelError(f"{self.lanes[lane].name} writes shared state before its first yield")
        return generator, step

    def _learn(self, point: Point, shared: Sequence[Hashable]) -> Outcome:
        """Run the step as Python, once, and keep what it read and did."""
        tape = self._use(Tape(shared))
        if point.guard is not None and not self._may(point, point.guard):
            return self._keep(point, tape, Outcome(False, _mask(tape.reads), 0))
        asked = dict(tape.reads)
        generator = self._copy(point)
        tape = self._use(Tape(shared))
        step, failure = self._run(point, generator)
        answers, changes = dict(tape.reads), _changes(tape)
        arrived = self._arrive(Point(point.lane, step, generator, point, answers))
        tape.reads = asked | answers
        outcome = Outcome(True, _mask(tape.reads), _mask(changes), tuple(changes.items()), arrived, failure)
        return self._keep(point, tape, outcome)

    def _may(self, point: Point, guard: Guard) -> object:
        try:
            return guard()
        except Exception as error:
            raise ModelError(f"{self._named(point)}: its condition raised {told(error)}") from error

    def _run(self, point: Point, generator: Steps) -> tuple[Step | None, str | None]:
        """Advance by one step: the next one, and the message of an assertion that failed."""
        self.python_steps += 1
        try:
            return _next(generator), None
        except AssertionError as error:
            return None, str(error) or "assertion failed"
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{self._named(point)} raised {told(error)}") from error

    def _named(self, point: Point) -> str:
        return f"step {point.label!r} of {self.lanes[point.lane].name}"

    def _copy(self, point: Point) -> Steps:
        """A generator that stands at `point`, to be advanced by the caller."""
        past: list[Mapping[int, Any]] = []
        lane = point.lane
        at: Point = point
        while at.parent is not None:
            past.append(at.answers)
            at = at.parent
        generator, _step = self._restart(lane)
        for answers in reversed(past):
            self._use(Tape(answers))
            try:
                next(generator)
            except (KeyError, StopIteration):
                raise ModelError(f"{self.lanes[lane].name} does not do the same when it is run again") from None
        return generator

    def _keep(self, point: Point, tape: Tape, outcome: Outcome) -> Outcome:
        """Grow the decision tree of `point` by one path."""
        reads = list(tape.reads.items())
        if not reads:
            point.tree = outcome
            return outcome
        if point.tree is None:
            point.tree = Ask(reads[0][0], {})
        node = point.tree
        for (variable, value), following in zip(reads, [*reads[1:], None], strict=True):
            if type(node) is not Ask or node.variable != variable:
                raise ModelError(f"{self._named(point)} is not a function of what it reads")
            node = node.branches.setdefault(value, outcome if following is None else Ask(following[0], {}))
        return outcome

    def _arrive(self, point: Point) -> int:
        key = _identity(point, self.model)
        number = self._numbers.get(key)
        if number is None:
            if len(self._points) >= POINTS_MAX:
                raise ModelError(f"{self.lanes[point.lane].name} stands at more than {POINTS_MAX} different points")
            number = self._numbers[key] = len(self._points)
            self._points.append(point)
        return number

    def _use(self, tape: Tape) -> Tape:
        self.model._tape = tape
        return tape


def _mask(indices: Mapping[int, Any]) -> int:
    return sum(1 << index for index in indices)


def _changes(tape: Tape) -> dict[int, Any]:
    """The writes, without those that store the value that was read: whoever writes the variable depends on the read."""
    kept = tape.writes.items()
    return {index: value for index, value in kept if index not in tape.reads or not _same(tape.reads[index], value)}


def _same(old: object, new: object) -> bool:
    return type(old) is type(new) and old == new


def _next(generator: Steps) -> Step | None:
    """The next step of a process; None when it ends."""
    for step in generator:
        match step:
            case str() | (str(), Callable()) if 0 < len(_label_and_guard(step)[0]) <= NAME_MAX:
                return step
        raise ModelError(f"a process yielded {step!r}: it takes a name of 1 to {NAME_MAX} characters, or (name, condition)")
    return None


def _label_and_guard(step: Step | None) -> tuple[str, Guard | None]:
    return step if isinstance(step, tuple) else (step or "", None)


def _identity(point: Point, model: Model) -> Hashable:
    """Equal for two points of a lane from which the same future follows."""
    if not point.label:
        return (point.lane, "ended")
    frames = list(_frames(point.generator))
    if all(frame is not None and _tells_all(frame[0]) for frame in frames):
        return (point.lane, point.label, tuple((code, at, _frozen(names, model)) for code, at, names in filter(None, frames)))
    return (point.lane, point.label, id(point.parent), tuple(point.answers.items()))


def _frames(generator: Any) -> Iterator[tuple[types.CodeType, int, Mapping[str, Any]] | None]:
    """The generator and those it delegates to. None: something whose position cannot be seen."""
    while generator is not None:
        if not isinstance(generator, types.GeneratorType):
            yield None
            return
        frame: Any = generator.gi_frame
        yield frame.f_code, frame.f_lasti, dict(frame.f_locals)
        generator = generator.gi_yieldfrom


def _frozen(value: Any, model: Model) -> Hashable:
    match value:
        case dict():
            return tuple((key, _frozen(item, model)) for key, item in value.items())
        case tuple():
            return tuple(_frozen(item, model) for item in value)
        case list():
            return ("list", *(_frozen(item, model) for item in value))
        case set():
            return frozenset(value)
        case _ if value is model:
            return "model"
        case Hashable():
            return value
    raise ModelError(f"local variable {value!r} cannot be compared: use values, lists, dicts and sets of values")


@cache
def _tells_all(code: types.CodeType) -> bool:
    """Whether position and local variables determine what a generator of this code does next."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return False
    plain = {id(found) for found in _plain_yields(tree)}
    return all(id(node) in plain for node in ast.walk(tree) if isinstance(node, ast.Yield | ast.YieldFrom))


def _plain_yields(node: ast.AST) -> Iterator[ast.AST]:
    """The yields that are a statement, outside of every block that keeps something alive."""
    for child in _open_children(node):
        match child:
            case (
                ast.Expr(value=ast.Yield() | ast.YieldFrom() as found)
                | ast.Assign(value=ast.Yield() | ast.YieldFrom() as found)
            ):
                yield found
            case ast.For() | ast.With() | ast.Match() | ast.ExceptHandler():
                continue
            case _:
                yield from _plain_yields(child)


def _open_children(node: ast.AST) -> Iterator[ast.AST]:
    closed = {id(child) for child in node.finalbody} if isinstance(node, ast.Try) else frozenset()
    return (child for child in ast.iter_child_nodes(node) if id(child) not in closed)
