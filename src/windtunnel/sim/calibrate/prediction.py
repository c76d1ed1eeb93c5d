"""Predicted beside measured: the table of a calibration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.core.profile import Profile
from windtunnel.sim.calibrate.fit import series
from windtunnel.sim.calibrate.measured import Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay

TOLERANCE = {50: 0.10, 99: 0.20}
"""The aim: medians within 10 %, 99th percentiles within 20 %."""
NOISE_MARK = " °"
"""After a miss that lies within the sampling error of what was measured."""
_RESAMPLINGS = 200
_BOUNDS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One quantity of one run, in milliseconds. `low_ms` and `high_ms` are the extremes over the seeds.

    `measured_low_ms` and `measured_high_ms` bound the measured one in 95 of 100 resamplings of the run's requests: how well so
    few requests know it, whatever the machine did meanwhile.
    """

    run: str
    fitted: bool
    quantity: str
    percentile: int
    measured_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_low_ms: float
    measured_high_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def hit(self) -> bool:
        return abs(self.error) <= TOLERANCE[self.percentile]

    @property
    def within_sampling_error(self) -> bool:
        return self.measured_low_ms <= self.predicted_ms <= self.measured_high_ms


def predict(
    runs: Sequence[Run],
    fitted: Sequence[Run],
    profile_of: Callable[[Run], Profile],
    limits: EngineLimits,
    seeds: Sequence[int],
) -> list[Prediction]:
    return [row for run in runs for row in _of_run(run, run in fitted, profile_of(run), limits, seeds)]


def _of_run(run: Run, fitted: bool, profile: Profile, limits: EngineLimits, seeds: Sequence[int]) -> Iterator[Prediction]:
    measured, resampled = series(run), _resampled(run)
    simulated = [series(replay(run, profile, limits, seed=seed)) for seed in seeds]
    for quantity, values in measured.items():
        if not len(values):
            continue
        for percentile in TOLERANCE:
            each = [float(np.percentile(one[quantity], percentile)) for one in simulated]
            real = float(np.percentile(values, percentile))
            low, high = np.percentile(resampled[quantity, percentile], _BOUNDS)
            yield Prediction(
                run.name,
                fitted,
                quantity,
                percentile,
                real,
                float(np.mean(each)),
                min(each),
                max(each),
                float(low),
                float(high),
            )


def _resampled(run: Run) -> Mapping[tuple[str, int], Sequence[float]]:
    """Each quantile of requests drawn anew, with replacement; a request brings all its gaps."""
    parts = [series(Run("", None, [one])) for one in run.requests]
    chance = np.random.default_rng(0)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(_RESAMPLINGS):
        drawn = [parts[at] for at in chance.integers(len(parts), size=len(parts))]
        for quantity in parts[0]:
            values = np.concatenate([one[quantity] for one in drawn])
            shares = np.percentile(values, list(TOLERANCE)) if len(values) else [0.0] * len(TOLERANCE)
            for percentile, value in zip(TOLERANCE, shares, strict=True):
                found.setdefault((quantity, percentile), []).append(float(value))
    return found


def markdown(rows: Sequence[Prediction]) -> str:
    """One line for each run; a miss is bold, and marked if the measurement is no surer than that."""
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
    return text if row.hit else f"**{text}**{NOISE_MARK if row.within_sampling_error else ''}"
