"""What a self-test has shown: rates with exact 95 % intervals, each defect by itself, and whether the goal is met.

The goal: each defect is named right in at least 19 of 20 runs, and nothing is found in 200 clean ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from windtunnel.lab.selftest import BATTERY, PAIR_BATTERIES, Run
from windtunnel.lab.stats import clopper_pearson

GOAL_RATE = 0.95
GOAL_RUNS = 20
GOAL_CLEAN_RUNS = 200
REPORT_LIMIT = 50


def selftest_document(runs: Sequence[Run], planned: int, *, one_state: bool = True) -> dict[str, Any]:
    """Rates with exact 95 % intervals, and what was found for each fault. `named_right` counts towards the detection rate.

    With fewer runs than planned, or with runs of more than one state of the code, it is incomplete and the goal is not met.
    `goal` names the defects that fall short of it, and those that were tried less often than it speaks of.
    """
    faulty = [run for run in runs if run.case is not None]
    clean = [run for run in runs if run.case is None]
    by_fault: dict[str, list[Run]] = {}
    for run in faulty:
        assert run.case is not None
        by_fault.setdefault(run.case.fault, []).append(run)
    faults = {name: _fault_document(group) for name, group in sorted(by_fault.items())}
    named, found = (sum(one[key] for one in faults.values()) for key in ("named_right", "found"))
    alarms = [run for run in clean if run.seen or run.unusable]
    complete = one_state and len(runs) == planned
    below = [name for name, one in faults.items() if one["named_right"] < GOAL_RATE * one["runs"]]
    return {
        "complete": complete,
        "planned": planned,
        "one_state": one_state,
        "detection_rate": named / len(faulty) if faulty else None,
        "detection_ci95": _interval(named, len(faulty)),
        "found_rate": found / len(faulty) if faulty else None,
        "found_ci95": _interval(found, len(faulty)),
        "false_alarm_rate": len(alarms) / len(clean) if clean else None,
        "false_alarm_ci95": _interval(len(alarms), len(clean)),
        "faulty_runs": len(faulty),
        "clean_runs": len(clean),
        "by_fault": faults,
        "false_alarms": [_alarm_document(run) for run in alarms[:REPORT_LIMIT]],
        "battery": [name for battery in (BATTERY, *PAIR_BATTERIES.values()) for name, _ in battery],
        "goal": {"below": below, "too_few_runs": [name for name, one in faults.items() if one["runs"] < GOAL_RUNS]},
        "goal_met": complete and not below and not alarms,
    }


def _fault_document(group: Sequence[Run]) -> dict[str, Any]:
    case = group[0].case
    assert case is not None
    times = [seconds for run in group if (seconds := run.seconds_to(case.finding)) is not None]
    others = Counter(name for run in group for name in run.names if name != case.finding)
    return {
        "finding": case.finding,
        "runs": len(group),
        "found": sum(bool(run.seen) for run in group),
        "named_right": len(times),
        "named_right_ci95": _interval(len(times), len(group)),
        "seconds": round(median(times), 3) if times else None,
        "seconds_max": round(max(times), 3) if times else None,
        "also_named": dict(others),
        "consequences": dict(Counter(name for run in group for name in run.consequences)),
        "missed_seeds": [run.seed for run in group if case.finding not in run.names],
    }


def _alarm_document(run: Run) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "unusable": run.unusable,
        "findings": [
            {"name": one.finding.name, "storm": one.storm, "evidence": list(one.finding.evidence[:3])} for one in run.seen
        ],
    }


def _interval(hits: int, total: int) -> Mapping[str, float] | None:
    return clopper_pearson(hits, total)._asdict() if total else None


def summary(document: Mapping[str, Any]) -> Iterator[str]:
    """The document in lines, for people."""
    for name, one in document["by_fault"].items():
        yield _fault_line(name, one)
    for title, key, total in (
        ("found", "found", "faulty"),
        ("named right", "detection", "faulty"),
        ("false alarms", "false_alarm", "clean"),
    ):
        if document[f"{key}_rate"] is not None:
            rate, interval = document[f"{key}_rate"], document[f"{key}_ci95"]
            yield f"{title}: {rate:.1%} of {document[f'{total}_runs']} runs ({_shown(interval)})"
    if not document["complete"]:
        tried = document["faulty_runs"] + document["clean_runs"]
        why = "" if document["one_state"] else "; the sources changed meanwhile, so they are not of one state of the code"
        yield f"incomplete: {tried} of {document['planned']} servers were tried{why}"
    for alarm in document["false_alarms"]:
        yield f"false alarm, seed {alarm['seed']}: {alarm['unusable'] or alarm['findings']}"
    yield from _goal_lines(document)


def _fault_line(name: str, one: Mapping[str, Any]) -> str:
    seconds = "never" if one["seconds"] is None else f"{one['seconds']:.1f} s, at most {one['seconds_max']:.1f} s"
    also, after = (", ".join(f"{other} {count}" for other, count in one[key].items()) for key in ("also_named", "consequences"))
    return (
        f"{name}: {one['finding']} in {one['named_right']} of {one['runs']} ({_shown(one['named_right_ci95'])}),"
        f" after {seconds} (found at all: {one['found']}; also: {also or 'nothing'}; consequences: {after or 'none'})"
    )


def _goal_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Each half of the goal: held or not, and where fewer servers were tried than it speaks of, that it is not shown."""
    faults, goal, clean = document["by_fault"], document["goal"], document["clean_runs"]
    below = [f"{name} ({faults[name]['named_right']} of {faults[name]['runs']})" for name in goal["below"]]
    alarms = round((document["false_alarm_rate"] or 0) * clean)
    few = len(goal["too_few_runs"])
    named = _goal(bool(faults), below, few and f"{few} of {len(faults)} defects have fewer than {GOAL_RUNS} runs")
    quiet = _goal(clean > 0, [f"{alarms} of {clean}"][:alarms], clean < GOAL_CLEAN_RUNS and f"there were {clean}")
    yield f"goal, every defect named right in 19 of 20 runs: {named}"
    yield f"goal, no false alarm in {GOAL_CLEAN_RUNS} clean runs: {quiet}"


def _goal(tried: bool, short: Sequence[str], too_few: str | int) -> str:
    if not tried:
        return "not tried"
    if short:
        return f"missed: {', '.join(short)}"
    return f"holds so far, not shown: {too_few}" if too_few else "met"


def _shown(interval: Mapping[str, float]) -> str:
    return f"95 %: {interval['low']:.1%}…{interval['high']:.1%}"
