"""The lab tested blind: one battery of storms over servers with a planted defect and over as many clean ones.

Whoever judges a server (`examine`) is given its address and a seed, nothing else. The order of servers is drawn from
the seed. A defect is *found* when anything is found, and *named right* when the finding that its catalogue entry names is among
the findings. On a clean server every finding is a false alarm.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from windtunnel.core.units import MS, S
from windtunnel.lab.arms import Stopped, running
from windtunnel.lab.connection import How
from windtunnel.lab.experiment_file import Arm, Environment
from windtunnel.lab.findings import Finding, find
from windtunnel.lab.plan import METRICS_BYSTANDER, Api, Moment, Shape, StormPlan, Trigger
from windtunnel.lab.stats import clopper_pearson
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import Target, TargetError, find_context, find_model, make_target

GOAL_RATE = 0.95
CLEAN = "clean"
COMMAND = "{python} -m windtunnel serve --engine vllm --model windtunnel --port {port} --ttft 10ms --itl 4ms"
LONG_PROMPT_SHARE = 0.7
"""Of the context that the server advertises: such a prompt must be served."""
REPORT_LIMIT = 50

_QUICK = StormPlan(
    victims=8,
    hold=True,
    victim=Shape(max_tokens=600),
    survivor=Shape(max_tokens=40),
    later=4,
    sample_every_ns=20 * MS,
    quiet_deadline_ns=1_500 * MS,
    request_timeout_ns=3 * S,
    linger_ns=200 * MS,
    bystanders=8,
)
_CHAT = Shape(Api.CHAT, max_tokens=600)
BATTERY: tuple[tuple[str, StormPlan], ...] = (
    ("crowd", replace(_QUICK, how=(How.FIN, How.RST), survivors=3, bystanders=16, later=6)),
    (
        "everybody leaves",
        replace(_QUICK, how=(How.RST, How.HALF_CLOSE), victim=_CHAT, bystanders=0, later_shape=Shape(Api.CHAT)),
    ),
    (
        "unary",
        replace(
            _QUICK,
            victim=Shape(max_tokens=600, stream=False),
            when=Trigger(Moment.AFTER, 0, 40 * MS),
            bystanders=4,
            bystander_kinds=(METRICS_BYSTANDER,),
            later_shape=Shape(stream=False),
        ),
    ),
    ("children", replace(_QUICK, victim=Shape(max_tokens=600, n=2), how=(How.FIN, How.STOP_READING), stall_ns=100 * MS)),
    ("long prompt", replace(_QUICK, victims=2, when=Trigger(Moment.SENT, 0), survivors=1, bystanders=4)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One planted defect, and the finding that it must raise."""

    fault: str
    finding: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One finding, and how long after the server was ready its storm had ended."""

    finding: Finding
    storm: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One server, examined. `case` is None for a clean one; it is looked at only when everything is over."""

    case: Case | None
    seed: int
    seen: tuple[Seen, ...]
    seconds: float
    unusable: str | None = None
    """Why the battery could not be ended: the server stopped answering, or did not start."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.finding.name for one in self.seen))

    def seconds_to(self, name: str) -> float | None:
        return next((one.seconds for one in self.seen if one.finding.name == name), None)


async def examine(url: str, seed: int) -> tuple[tuple[Seen, ...], str | None]:
    """The battery against one address. The second value says why it ended early, if it did."""
    started = time.monotonic()
    seen: list[Seen] = []
    try:
        target = make_target(url, await find_model(url, {}))
        for number, (name, plan) in enumerate(BATTERY):
            result = await run_storm(target, await _fitted(target, replace(plan, seed=seed * 100 + number)))
            seconds = time.monotonic() - started
            seen += [Seen(finding, name, seconds) for finding in find(result)]
            if any(one.finding.name in ("wedged", "unreachable") for one in seen):
                break  # nothing more can be learnt from a server that serves nothing
    except TargetError as error:
        return tuple(seen), str(error)
    return tuple(seen), None


async def _fitted(target: Target, plan: StormPlan) -> StormPlan:
    """The plan with one prompt of each storm's survivors as long as the server's context allows, where it says how long."""
    if plan.survivors != 1:
        return plan
    context = await find_context(target)
    words = max(1, int((context or 0) * LONG_PROMPT_SHARE) - plan.survivor.max_tokens)
    return replace(plan, survivor=replace(plan.survivor, prompt_words=words))


def schedule(cases: Sequence[Case], runs: int, seed: int) -> list[tuple[Case | None, int]]:
    """Every case `runs` times and as many clean servers, in an order drawn from the seed."""
    order: list[tuple[Case | None, int]] = [(case, number) for case in cases for number in range(runs)]
    order += [(None, number) for number in range(len(order))]
    Random(seed).shuffle(order)
    return [(case, seed + number) for case, number in order]


async def run_selftest(
    cases: Sequence[Case],
    *,
    runs: int,
    seed: int = 0,
    jobs: int = 1,
    stop: asyncio.Event | None = None,
    tell: Callable[[Run, int, int], None] | None = None,
) -> list[Run]:
    """All servers, `jobs` at a time. When `stop` is set, what is done so far."""
    stop = stop or asyncio.Event()
    order = schedule(cases, runs, seed)
    todo = iter(order)
    done: list[Run] = []

    async def worker(scratch: Path) -> None:
        for case, number in todo:
            if stop.is_set():
                return
            try:
                done.append(await _one(case, number, scratch, stop))
            except Stopped:
                return
            if tell is not None:
                tell(done[-1], len(done), len(order))

    with tempfile.TemporaryDirectory(prefix="windtunnel-selftest-") as scratch:
        async with asyncio.TaskGroup() as group:
            for number in range(jobs):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                group.create_task(worker(folder))
    return done


async def _one(case: Case | None, seed: int, scratch: Path, stop: asyncio.Event) -> Run:
    arm = Arm(command=COMMAND if case is None else f"{COMMAND} --fault {case.fault}")
    started = time.monotonic()
    try:
        async with running(arm, scratch / "server.log", time_scale=1.0, seed=seed, stop=stop) as server:
            seen, unusable = await examine(server.url, seed)
    except Environment as error:
        seen, unusable = (), str(error)
    return Run(case, seed, seen, time.monotonic() - started, unusable)


def selftest_document(runs: Iterable[Run]) -> dict[str, Any]:
    """Rates with exact 95 % intervals, and what was found for each fault. `named_right` counts towards the detection rate."""
    runs = list(runs)
    faulty = [run for run in runs if run.case is not None]
    clean = [run for run in runs if run.case is None]
    by_fault: dict[str, list[Run]] = {}
    for run in faulty:
        assert run.case is not None
        by_fault.setdefault(run.case.fault, []).append(run)
    faults = {name: _fault_document(group) for name, group in sorted(by_fault.items())}
    named = sum(one["named_right"] for one in faults.values())
    alarms = [run for run in clean if run.seen or run.unusable]
    return {
        "detection_rate": named / len(faulty) if faulty else None,
        "detection_ci95": _interval(named, len(faulty)),
        "false_alarm_rate": len(alarms) / len(clean) if clean else None,
        "false_alarm_ci95": _interval(len(alarms), len(clean)),
        "faulty_runs": len(faulty),
        "clean_runs": len(clean),
        "by_fault": faults,
        "false_alarms": [_alarm_document(run) for run in alarms[:REPORT_LIMIT]],
        "battery": [name for name, _ in BATTERY],
        "goal_met": not alarms and all(one["named_right"] >= GOAL_RATE * one["runs"] for one in faults.values()),
    }


def _fault_document(group: Sequence[Run]) -> dict[str, Any]:
    case = group[0].case
    assert case is not None
    times = [seconds for run in group if (seconds := run.seconds_to(case.finding)) is not None]
    others: dict[str, int] = {}
    for name in (name for run in group for name in run.names if name != case.finding):
        others[name] = others.get(name, 0) + 1
    return {
        "finding": case.finding,
        "runs": len(group),
        "found": sum(bool(run.seen) for run in group),
        "named_right": len(times),
        "seconds": round(median(times), 3) if times else None,
        "seconds_max": round(max(times), 3) if times else None,
        "also_named": others,
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
