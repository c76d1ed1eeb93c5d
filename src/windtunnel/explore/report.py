"""What `explore run` says: one JSON document, or a page of text."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.explore import replay
from windtunnel.explore.catalogue import Scenario
from windtunnel.explore.machine import Machine
from windtunnel.explore.model import Model
from windtunnel.explore.searches import Limits, Result, Violation, exhaustive, pct_walks, random_walks
from windtunnel.explore.shrink import shrink

DEFAULT_SEARCH = "exhaustive"

Search = Callable[[Machine, Limits, int, bool], Result]

SEARCHES: Mapping[str, Search] = {
    DEFAULT_SEARCH: lambda machine, limits, _seed, reduce: exhaustive(machine, limits, reduce),
    "random": lambda machine, limits, seed, _reduce: random_walks(machine, limits, seed),
    "pct": lambda machine, limits, seed, _reduce: pct_walks(machine, limits, seed),
}


class Finding(NamedTuple):
    violation: Violation
    replay: replay.Replay
    path: Path


class Report(NamedTuple):
    scenario: Scenario
    model: Model
    result: Result
    seed: int | None
    findings: Sequence[Finding]


def explore(scenario: Scenario, model: Model, search: str, limits: Limits, seed: int, reduce: bool, out: Path) -> Report:
    """Search, shrink what is found, and save a replay file for each broken invariant."""
    machine = Machine(model)
    result = SEARCHES[search](machine, limits, seed, reduce)
    seeded = None if search == DEFAULT_SEARCH else seed
    findings = []
    for invariant in sorted(result.violations):
        violation = shrink(machine, result.violations[invariant], limits)
        found = replay.record(scenario, machine, violation, search, seeded)
        out.mkdir(parents=True, exist_ok=True)
        path = out / _file_name(found, model)
        replay.write(found, path)
        findings.append(Finding(violation, found, path))
    return Report(scenario, model, result, seeded, findings)


def document(report: Report) -> dict[str, Any]:
    result = report.result
    return {
        "scenario": report.scenario.name,
        "parameters": {name: getattr(report.model, name) for name in report.model.parameters},
        "search": result.search,
        "seed": report.seed,
        "schedules": result.schedules,
        "states": result.states,
        "transitions": result.transitions,
        "depth": result.depth,
        "complete": result.complete,
        "stopped_by": result.stopped_by or None,
        "violations": [_violation(finding) for finding in report.findings],
    }


def _violation(finding: Finding) -> dict[str, Any]:
    violation, found = finding.violation, finding.replay
    return {
        "invariant": violation.invariant.name,
        "number": violation.invariant.number,
        "steps": len(violation.schedule),
        "healed_at": violation.healed_at,
        "minimal": violation.minimal,
        "schedule": [f"{process}: {step}" for process, step in found.schedule],
        "replay": str(finding.path),
    }


def text(report: Report) -> str:
    result = report.result
    parameters = " ".join(f"{name}={getattr(report.model, name)}" for name in report.model.parameters)
    bound = "the whole space" if result.complete else f"stopped by the limit of {result.stopped_by}"
    head = (
        f"{report.scenario.name} {parameters}".rstrip() + "\n"
        f"{result.search}: {result.schedules:,} schedules, {result.states:,} states, {result.transitions:,} steps, {bound}\n"
    )
    if not report.findings:
        return head + "no violation\n"
    return head + "".join(_paragraph(finding) for finding in report.findings)


def _paragraph(finding: Finding) -> str:
    violation, steps = finding.violation, finding.replay.schedule
    lines = [f"\nviolated: {violation.invariant} ({len(steps)} steps, {violation.minimal})"]
    for number, (process, step) in enumerate(steps, 1):
        if number - 1 == violation.healed_at:
            lines.append("      the faults stop")
        lines.append(f"  {number:>3} {process}: {step}")
    return "\n".join([*lines, f"  windtunnel explore replay {finding.path}", ""])


def _file_name(found: replay.Replay, model: Model) -> str:
    """The same finding always has the same name. Parameters at their defaults and the default search are left out."""
    chosen = [f"{name}-{value}" for name, value in found.parameters.items() if value != model.parameters[name].default]
    search = [found.search] if found.search != DEFAULT_SEARCH else []
    stem = "_".join([Path(found.scenario).stem, *chosen, *search, str(found.invariant.number)])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem) + ".json"
