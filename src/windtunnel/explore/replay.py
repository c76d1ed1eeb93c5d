"""Replay files: a violation that anybody can run again, step by step.

A file names the scenario, its parameters and the schedule, as process and step for each line. A replay compares the step names
as it goes: a file of a model that has changed since says so, instead of showing something else.
"""

import json
import platform
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel import __version__
from windtunnel.explore.catalogue import Scenario
from windtunnel.explore.fairness import LivenessPhase
from windtunnel.explore.invariants import NO_STEP_FAILS, Invariant
from windtunnel.explore.machine import Machine, State
from windtunnel.explore.model import ModelError
from windtunnel.explore.searches import Violation

FORMAT = 1
FILE_BYTES_MAX = 4_000_000
STEPS_MAX = 20_000


class Replay(NamedTuple):
    """What a replay file says."""

    scenario: str
    parameters: Mapping[str, Any]
    invariant: Invariant
    schedule: Sequence[tuple[str, str]]
    """(process, step) in order."""
    healed_at: int | None
    minimal: str
    search: str
    seed: int | None


class Change(NamedTuple):
    variable: str
    before: str
    after: str


class Line(NamedTuple):
    """One step of a replay, as it is shown.

    `breaks`: the invariant breaks here; for an `@eventually`, turn after turn from here on ends badly.
    `offends`: the last write of what the breaking step reads.
    """

    number: int
    lane: int
    process: str
    step: str
    changes: Sequence[Change]
    fault: bool
    after_faults: bool
    breaks: bool
    offends: bool = False


class Story(NamedTuple):
    """A replay that has been run."""

    replay: Replay
    lanes: Sequence[str]
    initial: Sequence[tuple[str, str]]
    lines: Sequence[Line]
    states: Sequence[Sequence[tuple[str, str]]]
    """The whole state after each line."""
    broken: bool
    """The invariant broke again."""


def record(scenario: Scenario, machine: Machine, violation: Violation, search: str, seed: int | None) -> Replay:
    """The replay of a violation that a search has found."""
    state, schedule = machine.initial, []
    for lane in violation.schedule:
        schedule.append((machine.lanes[lane].name, machine.label(state, lane)))
        state = machine.after(state, lane, machine.outcome(state, lane))
    parameters = {name: getattr(machine.model, name) for name in machine.model.parameters}
    return Replay(
        scenario.name, parameters, violation.invariant, schedule, violation.healed_at, violation.minimal, search, seed
    )


def write(replay: Replay, path: Path) -> None:
    versions = {"windtunnel": __version__, "python": platform.python_version(), "format": FORMAT}
    document = replay._asdict() | {"invariant": replay.invariant._asdict(), "versions": versions}
    document["schedule"] = [{"process": process, "step": step} for process, step in replay.schedule]
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> Replay:
    """Raises ModelError with what is wrong in the file."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ModelError(f"{path}: larger than {FILE_BYTES_MAX} bytes; not a replay file")
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a replay file: {type(error).__name__}: {error}") from None


def _parsed(document: Mapping[str, Any]) -> Replay:
    if document["versions"]["format"] != FORMAT:
        raise ModelError(f"replay format {document['versions']['format']}; this version reads format {FORMAT}")
    schedule = [(str(line["process"]), str(line["step"])) for line in document["schedule"]]
    if len(schedule) > STEPS_MAX:
        raise ModelError(f"a replay of {len(schedule)} steps; the limit is {STEPS_MAX}")
    fields = {name: document[name] for name in Replay._fields}
    return Replay(**fields | {"invariant": Invariant(**document["invariant"]), "schedule": schedule})


def run(replay: Replay, machine: Machine) -> Story:
    """Step by step, on a machine of the same scenario and parameters."""
    state, lines, states = machine.initial, list[Line](), list[list[tuple[str, str]]]()
    writers: dict[int, int] = {}
    lanes = {process.name: lane for lane, process in enumerate(machine.lanes)}
    for number, (process, step) in enumerate(replay.schedule, 1):
        lane = _lane(machine, state, lanes, number, process, step)
        outcome = machine.outcome(state, lane)
        after = machine.after(state, lane, outcome)
        breaks = _breaks(replay, machine, after, number, outcome.failure)
        healed = replay.healed_at is not None and number > replay.healed_at
        changes = _changes(machine.view(state), machine.view(after))
        lines.append(Line(number, lane, process, step, changes, machine.lanes[lane].fault, healed, breaks))
        if breaks and replay.healed_at is None:
            _mark_offender(lines, max((writers[index] for index in writers if outcome.reads >> index & 1), default=0))
        writers.update((index, number) for index, _value in outcome.effect)
        state = after
        states.append(_shown_state(machine, state))
    broken = any(line.breaks for line in lines) or _ends_badly(replay, machine)
    return Story(replay, tuple(lanes), _shown_state(machine, machine.initial), lines, states, broken)


def _mark_offender(lines: list[Line], number: int) -> None:
    if number:
        lines[number - 1] = lines[number - 1]._replace(offends=True)


def _shown_state(machine: Machine, state: State) -> list[tuple[str, str]]:
    return [(name, shown(value)) for name, value in machine.view(state).items()]


def _lane(machine: Machine, state: State, lanes: Mapping[str, int], number: int, process: str, step: str) -> int:
    lane = lanes.get(process)
    if lane is None:
        raise ModelError(f"step {number}: the model has no process {process!r}; it has changed since it was saved")
    label = machine.label(state, lane)
    if label != step or not machine.outcome(state, lane).enabled:
        stands = f"stands before {label!r}" if label else "has ended"
        raise ModelError(f"step {number}: {process} cannot do {step!r}: it {stands}; the model has changed since it was saved")
    return lane


def _breaks(replay: Replay, machine: Machine, state: State, number: int, failure: str | None) -> bool:
    if replay.healed_at is not None:
        return number == (replay.healed_at or len(replay.schedule)) and _ends_badly(replay, machine)
    if replay.invariant == NO_STEP_FAILS:
        return failure is not None
    return any(check.invariant == replay.invariant for check in machine.broken(state, machine.always))


def _ends_badly(replay: Replay, machine: Machine) -> bool:
    """Whether the future after the faults stop fails the invariant. Decided from the point where they stop."""
    state, lanes = machine.initial, {process.name: lane for lane, process in enumerate(machine.lanes)}
    for process, _step in replay.schedule[: replay.healed_at]:
        state = machine.after(state, lanes[process], machine.outcome(state, lanes[process]))
    failing = LivenessPhase(machine, STEPS_MAX).broken(state)
    return any(check.invariant == replay.invariant for check in failing)


def document(story: Story) -> dict[str, Any]:
    """The story as plain values."""
    lines = [line._asdict() | {"changes": [change._asdict() for change in line.changes]} for line in story.lines]
    return {
        "scenario": story.replay.scenario,
        "parameters": dict(story.replay.parameters),
        "invariant": story.replay.invariant._asdict(),
        "healed_at": story.replay.healed_at,
        "initial": dict(story.initial),
        "lines": lines,
        "broken": story.broken,
    }


def _changes(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> list[Change]:
    return [change for name in before for change in differences(name, before[name], after[name])]


def differences(name: str, before: Any, after: Any) -> Iterator[Change]:
    """What differs, as deep inside tuples of equal shape as it can be named."""
    if before == after:
        return
    same_shape = isinstance(before, tuple) and type(before) is type(after) and len(before) == len(after)
    if not same_shape:
        yield Change(name, shown(before), shown(after))
        return
    parts = [f"{name}.{field}" for field in getattr(before, "_fields", ())] or [f"{name}[{at}]" for at in range(len(before))]
    for part, old, new in zip(parts, before, after, strict=True):
        yield from differences(part, old, new)


def shown(value: object) -> str:
    """A value as people read it: the names of enums, sets and tuples without type names."""
    match value:
        case Enum():
            return value.name.lower().replace("_", " ")
        case str():
            return value or "“”"
        case tuple():
            names = getattr(value, "_fields", None)
            parts = [f"{name} {shown(item)}" for name, item in zip(names, value, strict=True)] if names else map(shown, value)
            return f"({', '.join(parts)})"
        case frozenset():
            return f"{{{', '.join(sorted(map(shown, value)))}}}"
        case bool() | None:
            return {True: "yes", False: "no", None: "none"}[value]
    return str(value)
