"""Predicted beside measured: the table of a calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.core.profile import Profile
from windtunnel.sim.calibrate.fit import series
from windtunnel.sim.calibrate.measured import Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay

TOLERANCE = {50: 0.10, 99: 0.20}
"""The aim: medians within 10 %, 99th percentiles within 20 %."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One quantity of one run, in milliseconds. `low_ms` and `high_ms` are the extremes over the seeds."""

    run: str
    fitted: bool
    quantity: str
    percentile: int
    measured_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def hit(self) -> bool:
        return abs(self.error) <= TOLERANCE[self.percentile]


def predict(
    runs: Sequence[Run], fitted: Sequence[Run], profile: Profile, limits: EngineLimits, seeds: Sequence[int]
) -> list[Prediction]:
    return [row for run in runs for row in _of_run(run, run in fitted, profile, limits, seeds)]


def _of_run(run: Run, fitted: bool, profile: Profile, limits: EngineLimits, seeds: Sequence[int]) -> Iterator[Prediction]:
    measured = series(run)
    simulated = [series(replay(run, profile, limits, seed=seed)) for seed in seeds]
    for quantity, values in measured.items():
        if not len(values):
            continue
        for percentile in TOLERANCE:
            each = [float(np.percentile(one[quantity], percentile)) for one in simulated]
            real = float(np.percentile(values, percentile))
            yield Prediction(run.name, fitted, quantity, percentile, real, float(np.mean(each)), min(each), max(each))


def markdown(rows: Sequence[Prediction]) -> str:
    """One line for each run; a miss is marked."""
    columns = list(dict.fromkeys((row.quantity, row.percentile) for row in rows))
    head = " | ".join(f"{quantity} p{percentile}" for quantity, percentile in columns)
    lines = [f"| run | {head} |", "| --- |" + " --- |" * len(columns)]
    for name in dict.fromkeys(row.run for row in rows):
        cells = {(row.quantity, row.percentile): row for row in rows if row.run == name}
        mark = " (fitted)" if next(iter(cells.values())).fitted else ""
        lines.append(
            f"| {name}{mark} | " + " | ".join(_cell(cells[column]) if column in cells else "" for column in columns) + " |"
        )
    return "\n".join(lines)


def _cell(row: Prediction) -> str:
    text = f"{row.measured_ms:.2f} → {row.predicted_ms:.2f} ({100 * row.error:+.0f} %)"
    return text if row.hit else f"**{text}**"
