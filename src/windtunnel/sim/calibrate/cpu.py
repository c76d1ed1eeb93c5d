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


def read_other_jobs(path: Path) -> Mapping[str, Series]:
    """Of each group of runs. Raises TraceError, OSError."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(path):
        until_s, cores = row.number("t_s"), row.number("other_cores", most=MOST_CORES)
        group = series.setdefault(f"pass {row.data['pass']}" if "pass" in row.data else "", [])
        if group and until_s <= group[-1][0]:
            raise TraceError(f"{row.where}: t_s is {until_s:g}: must be above the {group[-1][0]:g} of the line before")
        group.append((until_s, cores))
    return {name: tuple(group) for name, group in series.items()}


def beside_other_jobs(runs: Sequence[Run], series: Mapping[str, Series]) -> list[Run]:
    """The runs with what other jobs took. Raises TraceError if the series lacks a run's group."""
    for run in runs:
        if run.group not in series:
            raise TraceError(
                f"--cpu has no line of {run.group or 'a trace without passes'}; it has {', '.join(series) or 'none'}"
            )
    return [replace(run, other_jobs=series[run.group]) for run in runs]
