"""Predicted beside measured: the table of a calibration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.core.profile import Profile
from windtunnel.sim.calibrate.fit import series
from windtunnel.sim.calibrate.lone import Vector
from windtunnel.sim.calibrate.measured import Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay

TOLERANCE = {50: 0.10, 99: 0.20}
"""The aim: medians within 10 %, 99th percentiles within 20 %."""
NOISE_MARK = " °"
"""After a miss that lies within the sampling error of what was measured."""
DRIFT_MARK = " ≠"
"""After a miss whose run was not one thing: its two halves differ by more than the tolerance."""
_RESAMPLINGS = 200
_BOUNDS = (2.5, 97.5)
_LEAST_MS = 1e-6


@dataclass(frozen=True, slots=True)
class Prediction:
    """One quantity of one run, in milliseconds. `low_ms` and `high_ms` are the extremes over the seeds.

    `measured_low_ms` and `measured_high_ms` bound the measured one in 95 of 100 resamplings of the run's requests: how well so
    few requests know it, whatever the machine did meanwhile. In `resampled_share` of them it would hit as a prediction.

    `halves` are (measured, predicted) of the first and of the second half of its requests; none if they are too few.
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
    resampled_share: float
    halves: tuple[tuple[float, float], ...] = ()

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def hit(self) -> bool:
        return abs(self.error) <= TOLERANCE[self.percentile]

    @property
    def within_sampling_error(self) -> bool:
        return self.measured_low_ms <= self.predicted_ms <= self.measured_high_ms

    @property
    def alike(self) -> bool:
        """The halves, taken as predictions of each other, hit."""
        return self._agree([real for real, _ours in self.halves])

    @property
    def steady(self) -> bool:
        """They do, each divided by its own prediction: they asked for different things, and the prediction knows that."""
        return self._agree([_ratio(*half) for half in self.halves])

    @property
    def within_reach(self) -> float:
        """The share of halves for which a prediction would hit that is exact about the whole run.

        Where times are independent, half a run is as far from the whole as the whole from what it is a sample of: so this is
        what is left to the best of profiles.
        """
        whole = _ratio(self.measured_ms, self.predicted_ms)
        hits = [abs(_ratio(*half) / whole - 1) <= TOLERANCE[self.percentile] for half in self.halves]
        return sum(hits) / len(hits) if hits else 1.0

    def _agree(self, halves: Sequence[float]) -> bool:
        return not halves or abs(_ratio(halves[1], halves[0]) - 1) <= TOLERANCE[self.percentile]


def _ratio(one: float, other: float) -> float:
    return max(one, _LEAST_MS) / max(other, _LEAST_MS)


def predict(
    runs: Sequence[Run],
    fitted: Sequence[Run],
    profile_of: Callable[[Run], Profile],
    limits: EngineLimits,
    seeds: Sequence[int],
) -> list[Prediction]:
    return [row for run in runs for row in _of_run(run, run in fitted, profile_of(run), limits, seeds)]


def _of_run(run: Run, fitted: bool, profile: Profile, limits: EngineLimits, seeds: Sequence[int]) -> Iterator[Prediction]:
    measured, resampled = _with_halves(run), _resampled(run)
    simulated = [_with_halves(replay(run, profile, limits, seed=seed)) for seed in seeds]
    for quantity in measured[0]:
        if not len(measured[0][quantity]):
            continue
        for percentile in TOLERANCE:
            each = [float(np.percentile(one[0][quantity], percentile)) for one in simulated]
            real = float(np.percentile(measured[0][quantity], percentile))
            drawn = np.array(resampled[quantity, percentile])
            low, high = np.percentile(drawn, _BOUNDS)
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
                float(np.mean(np.abs(drawn - real) <= TOLERANCE[percentile] * real)),
                _halves(measured, simulated, quantity, percentile),
            )


_Parts = Sequence[Mapping[str, Vector]]
"""A run, its first and its second half."""


def _with_halves(run: Run) -> _Parts:
    ordered = sorted(run.requests, key=lambda one: one.sent_s)
    middle = len(ordered) // 2
    return [series(replace(run, requests=part)) for part in (ordered, ordered[:middle], ordered[middle:])]


def _halves(measured: _Parts, simulated: Sequence[_Parts], quantity: str, percentile: int) -> tuple[tuple[float, float], ...]:
    def shown(parts: _Parts) -> list[float]:
        return [float(np.percentile(part[quantity], percentile)) for part in parts[1:]]

    if not all(len(part[quantity]) for parts in (measured, *simulated) for part in parts):
        return ()
    predicted = np.mean([shown(parts) for parts in simulated], axis=0)
    return tuple(zip(shown(measured), map(float, predicted), strict=True))


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


def summary(rows: Sequence[Prediction]) -> list[str]:
    """How many of these predictions hit, how far they are off, and how many could."""
    if not rows:
        return []
    missed = [row for row in rows if not row.hit]
    marks = (
        f"{sum(row.within_sampling_error for row in missed)} of the misses are{NOISE_MARK}, "
        f"{sum(not row.steady for row in missed)} are{DRIFT_MARK}"
    )
    reach, drawn = sum(row.within_reach for row in rows), sum(row.resampled_share for row in rows)
    return [
        f"Left out: {len(rows) - len(missed)} of {len(rows)} predictions hit; {marks}.",
        f"Off by (root mean square of log ratios, itl_token not counted): {', '.join(_offs(rows))}.",
        f"Halves of a run, taken as predictions of each other: {sum(row.alike for row in rows)} of {len(rows)} hit; "
        f"each divided by its own prediction: {sum(row.steady for row in rows)}.",
        f"A prediction exact about each whole run would hit {reach:g} of {len(rows)} for its halves, "
        f"{drawn:.0f} if its requests were drawn anew.",
    ]


def _offs(rows: Sequence[Prediction]) -> Iterator[str]:
    for percentile in TOLERANCE:
        counted = [row for row in rows if row.percentile == percentile and row.quantity != "itl_token"]
        if counted:
            squares = [np.log(_ratio(row.predicted_ms, row.measured_ms)) ** 2 for row in counted]
            yield f"p{percentile} {100 * np.sqrt(np.mean(squares)):.1f} %"


def _cell(row: Prediction) -> str:
    text = f"{row.measured_ms:.2f} → {row.predicted_ms:.2f} ({100 * row.error:+.0f} %)"
    if row.hit:
        return text
    return f"**{text}**{NOISE_MARK if row.within_sampling_error else ''}{'' if row.steady else DRIFT_MARK}"
