"""Fitting a profile to measured runs, in two stages.

First, what a lone client shows directly (`lone`).

Second, what shows only between requests (the cost of a decoding sequence, how the front end's loop divides its time, what it
takes from the engine, the engine's wake-up, extra noise under load) is found by replaying the other runs in the simulator and
comparing quantiles.

Runs that were measured together form a group. The costs of work are the server's, so all groups share them; a lone client's
base times and noise, and its client's cost of a write, belong to the group: the machine was as busy as it was at that time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from windtunnel.core.profile import FrontendCosts, Noise, Profile, StepCosts
from windtunnel.sim.calibrate.lone import FitError, Lone, Vector, lones
from windtunnel.sim.calibrate.measured import Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay
from windtunnel.sim.calibrate.search import descend

_SHARES = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(0.991, 0.999, 9), [1.0]])
_QUANTILES = (10, 50, 90, 99)
_WEIGHTS = (0.3, 2.0, 0.6, 0.5)
_TURNS = 6
"""Fits to the recorded trace do not tell 4, 6 and 10 apart."""
_SEEDS = 4
"""Replays of each run, whose means are compared: a quantile of one replay is as uncertain as one measured."""
_PRIOR = 0.01
"""What it costs the search to be a factor of e away from where it starts: what the runs do not tell stays near there."""


def _noise(rest_ms: Vector, lasting: float = 0.0, memory: float = 0.0) -> Noise:
    values = np.quantile(rest_ms, _SHARES) * 1e6
    return Noise(tuple(_SHARES.tolist()), tuple(float(round(value)) for value in values), round(lasting, 6), round(memory, 6))


@dataclass(frozen=True, slots=True)
class Shared:
    """What the second stage looks for; milliseconds."""

    decode_seq_ms: float
    frontend_step_ms: float
    wake_ms: float
    noise_growth: float
    contention: float
    chunk_factor: float
    """Only where nothing was timed after the last token: in hundredths of a lone step."""
    request_ms: float
    """Only where no headers were timed."""


def profile_of(alone: Lone, shared: Shared, source: str = "") -> Profile:
    decode_ms = min(shared.decode_seq_ms, alone.step_ms)
    chunk_ms = alone.chunk_ms or 0.01 * alone.step_ms * shared.chunk_factor
    rest_ms = alone.first_ms - shared.wake_ms - shared.frontend_step_ms - chunk_ms
    request_ms = min(max(0.0, rest_ms), shared.request_ms if alone.headers_ms is None else alone.headers_ms)
    return Profile(
        StepCosts(
            _ns(alone.step_ms - decode_ms),
            _ns(alone.prefill_token_ms),
            _ns(decode_ms),
            _ns(alone.context_token_ms),
            _ns(alone.prefill_pair_ms),
            round(shared.noise_growth, 6),
        ),
        FrontendCosts(
            _ns(request_ms),
            _ns(alone.prompt_token_ms),
            _ns(shared.frontend_step_ms),
            _ns(chunk_ms),
            _ns(shared.wake_ms),
            _ns(max(0.0, rest_ms - request_ms)),
            round(shared.contention, 6),
            _TURNS,
        ),
        _noise(alone.step_noise_ms, alone.lasting, alone.memory),
        _noise(alone.request_noise_ms),
        source,
        alone.machine,
    )


def _ns(ms: float) -> float:
    return round(ms * 1e6, 3)


def series(run: Run) -> dict[str, Vector]:
    """The quantities that are compared, in milliseconds."""
    return {
        "ttft": np.array([one.ttft_ms for one in run.requests]),
        "itl": np.array([gap for one in run.requests for gap in one.gaps_ms]),
        "itl_token": np.array([gap for one in run.requests for gap in one.token_gaps_ms]),
        "e2e": np.array([one.e2e_ms for one in run.requests]),
    }


def rests(measured: Mapping[str, Vector], simulated: Mapping[str, Vector]) -> Vector:
    """Logarithms of quantile ratios, weighted."""
    parts = []
    for name in ("ttft", "itl", "e2e"):
        real, ours = (np.maximum(np.percentile(values[name], _QUANTILES), 1e-6) for values in (measured, simulated))
        parts.append(np.sqrt(_WEIGHTS) * np.log(ours / real))
    return np.concatenate(parts)


@dataclass(frozen=True)
class Fit:
    """What a fit found: for each group with a lone client a profile of its surroundings, and one of all together."""

    profile: Profile
    groups: Mapping[str, Profile]
    distance: float | None
    """None: there was nothing to compare."""

    def of(self, run: Run) -> Profile:
        return self.groups.get(run.group, self.profile)


def fit(
    runs: Sequence[Run],
    limits: EngineLimits,
    *,
    seed: int = 0,
    rounds: int = 6,
    cores: int = 0,
    say: Callable[[str], None] = lambda _text: None,
    source: str = "",
) -> Fit:
    """Profiles of these runs. One of them must have concurrency 1.

    The search is local and takes at most so many `rounds`. `cores` of the machine; 0, not known: other jobs slow nothing.
    """
    single: dict[str, list[Run]] = {}
    for run in runs:
        if run.concurrency == 1:
            single.setdefault(run.group, []).append(run)
    if not single:
        raise FitError("no run with concurrency 1 among those to fit: it is what separates a step from the waiting around it")
    (pooled,) = lones([[run for group in single.values() for run in group]], cores)
    alone = dict(zip(single, lones(list(single.values()), cores), strict=True))
    others = [(run, alone.get(run.group, pooled)) for run in runs if run.concurrency != 1]
    best, least = _start(pooled), None
    if others:
        best, least = _Search(others, limits, seed, say).run(best, rounds)
    else:
        say("no run with concurrency above 1: the cost of a decoding sequence is a guess (5 % of a step)")
    groups = {name: profile_of(one, best, f"{source}; {name}" if name else source) for name, one in alone.items()}
    return Fit(profile_of(pooled, best, source), groups, least)


def _start(alone: Lone) -> Shared:
    return Shared(0.05 * alone.step_ms, 0.1 * alone.first_ms, 0.25 * alone.first_ms, 0.5, 0.5, 1.0, 0.5 * alone.first_ms)


class _Search:
    """The second stage: owns the runs it compares with, each with what a lone client showed in its surroundings."""

    def __init__(self, runs: Sequence[tuple[Run, Lone]], limits: EngineLimits, seed: int, say: Callable[[str], None]) -> None:
        # slow times move whole runs: they would drown what the search looks for
        self._runs = [(run, replace(alone, lasting=0.0), series(run)) for run, alone in runs]
        self._free = [name for name in _FREE if not all(_known(alone, name) for _run, alone in runs)]
        self._limits = limits
        self._seed = seed
        self._say = say

    def run(self, start: Shared, rounds: int) -> tuple[Shared, float]:
        origin = [getattr(start, name) for name in self._free]

        def at(point: Vector) -> Shared:
            """`point`: logarithms of the factors from `start`."""
            values = {name: value * float(np.exp(log)) for name, value, log in zip(self._free, origin, point, strict=True)}
            return replace(start, **values)

        def costs(point: Vector) -> Vector:
            return np.concatenate([self._rests(at(point)), sqrt(_PRIOR) * point])

        found = descend(costs, np.zeros(len(origin)), rounds, self._say)
        best = at(found)
        self._say(f"found {best}")
        return best, float(np.sum(self._rests(best) ** 2))

    def _rests(self, shared: Shared) -> Vector:
        return np.concatenate([self._of_run(run, profile_of(alone, shared), measured) for run, alone, measured in self._runs])

    def _of_run(self, run: Run, profile: Profile, measured: Mapping[str, Vector]) -> Vector:
        seeds = range(self._seed, self._seed + _SEEDS)
        each = [rests(measured, series(replay(run, profile, self._limits, seed=seed))) for seed in seeds]
        return np.asarray(np.mean(each, axis=0))


_FREE = ("decode_seq_ms", "frontend_step_ms", "wake_ms", "noise_growth", "contention", "chunk_factor", "request_ms")


def _known(alone: Lone, name: str) -> bool:
    """The lone client has shown it already."""
    return (name == "chunk_factor" and alone.chunk_ms > 0) or (name == "request_ms" and alone.headers_ms is not None)
