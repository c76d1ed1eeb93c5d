"""What other jobs took of the measured machine: JSONL beside a trace, on its clock.

A line has `t_s` and `other_cores`, the cores that jobs other than the server and its client took on average since the line
before, and `pass` where the trace has it. Other fields are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from windtunnel.core.profile import MOST_CORES
from windtunnel.sim.calibrate.formats import TraceError, read_rows
from windtunnel.sim.calibrate.measured import Run

Series = tuple[tuple[float, float], ...]


def read_other_jobs(paths: Sequence[Path]) -> Mapping[str, Series]:
    """Of each group of runs. Raises TraceError, OSError."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in [row for path in paths for row in read_rows(path)]:
        until_s, cores = row.number("t_s"), row.number("other_cores", most=MOST_CORES)
        group = series.setdefault(f"pass {row.data['pass']}" if "pass" in row.data else "", [])
        if group and until_s <= group[-1][0]:
            raise TraceError(f"{row.where}: t_s is {until_s:g}: must be above the {group[-1][0]:g} of the line before")
        group.append((until_s, cores))
    return {name: tuple(group) for name, group in series.items()}


def beside_other_jobs(runs: Sequence[Run], series: Mapping[str, Series]) -> list[Run]:
    """The runs with what other jobs took; undisturbed where the series lacks their group (`uncovered`).

    Raises TraceError if it lacks every run's.
    """
    if not any(run.group in series for run in runs):
        wanted = " or ".join(dict.fromkeys(run.group or "a trace without passes" for run in runs))
        raise TraceError(f"--cpu has no line of {wanted}; it has {', '.join(name or 'lines without pass' for name in series)}")
    return [replace(run, other_jobs=series.get(run.group, ())) for run in runs]


def uncovered(runs: Sequence[Run]) -> list[str]:
    """What the given series do not say about these runs."""
    doubts = [f"{name}: --cpu has no line of it: its runs are taken as undisturbed" for name in _groups_without_lines(runs)]
    for run in runs:
        last_s = max(one.sent_s for one in run.requests)
        if run.other_jobs and last_s > run.other_jobs[-1][0]:
            doubts.append(
                f"{run.name}: --cpu ends at {run.other_jobs[-1][0]:g} s and the last request is sent at {last_s:g} s: "
                "its last line is taken to last"
            )
    return doubts


def _groups_without_lines(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.group or "a trace without passes" for run in runs if not run.other_jobs))
