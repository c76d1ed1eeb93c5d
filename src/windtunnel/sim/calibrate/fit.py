"""Fitting a profile to measured runs, in two stages.

First, what a lone client shows directly. With one request at a time an inter-token gap is one step, so a regression of gaps on
context gives the base and the context cost; the time to first token, less such a step, gives the front end's request cost and
the prefill costs; what the regressions leave over is the noise. The writes after the last token give the cost of a chunk, the
response headers the loop's work for a request. The regressions minimise absolute deviations: medians, so that stalls do not
pull the line.

Second, what shows only between requests (the cost of a decoding sequence, how the front end's loop divides its time, what it
takes from the engine, the engine's wake-up, extra noise under load) is found by replaying the other runs in the simulator and
comparing quantiles.

Runs that were measured together form a group. The costs of work are the server's, so all groups share them; a lone client's
base times and noise, and its client's cost of a write, belong to the group: the machine was as busy as it was at that time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import norm, rankdata

from windtunnel.core.frontend import ENDING_WRITES
from windtunnel.core.machine import Machine
from windtunnel.core.profile import FrontendCosts, Noise, Profile, StepCosts
from windtunnel.sim.calibrate.measured import Measured, Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay
from windtunnel.sim.calibrate.search import Found, descend

Vector = NDArray[np.float64]

_SHARES = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(0.991, 0.999, 9), [1.0]])
_REWEIGHTS = 60
_QUANTILES = (10, 50, 90, 99)
_WEIGHTS = (0.3, 2.0, 0.6, 0.5)
_TURNS = (4, 6, 10)


class FitError(ValueError):
    """Measurements that cannot carry a fit: says what is missing."""


@dataclass(frozen=True, slots=True)
class Lone:
    """What the runs of one client say. Milliseconds, and milliseconds for each token."""

    step_ms: float
    context_token_ms: float
    first_ms: float
    """Request and front end, without the step."""
    prompt_token_ms: float
    prefill_token_ms: float
    prefill_pair_ms: float
    chunk_ms: float
    headers_ms: float | None
    """Median time to the response headers, where the tool has it."""
    step_noise_ms: Vector
    request_noise_ms: Vector
    lasting: float
    memory: float
    machine: Machine


def lones(groups: Sequence[Sequence[Measured]], cores: int = 0) -> list[Lone]:
    """What each group shows. The costs of a context token, a prompt token and prefill are the server's and found from all."""
    steps_ms, context_ms, step_rests, machine = _step_lines(groups, cores)
    quiet = [_quiet(group) for group in groups]
    prompt, uncached, pairs, first = (
        np.array(column, float) for column in zip(*(_first_row(one) for group in quiet for one in group), strict=True)
    )
    if np.array_equal(prompt, uncached):
        prompt = np.zeros_like(prompt)  # nothing was cached: the two cannot be told apart, and prefill has the larger part
    member = _membership(quiet)
    columns = np.column_stack([member, prompt, uncached, pairs])
    found, rest = _least_deviations(columns, first - member @ steps_ms - context_ms * prompt)
    per_prompt, per_prefill, per_pair = found[len(groups) :]
    return [
        Lone(
            float(steps_ms[at]),
            context_ms,
            found[at],
            per_prompt,
            per_prefill,
            per_pair,
            _chunk_ms(group),
            _headers_ms(group),
            step_rests[at],
            rest[member[:, at] > 0],
            *_persistence(step_rests[at]),
            machine,
        )
        for at, group in enumerate(groups)
    ]


def _chunk_ms(group: Sequence[Measured]) -> float:
    """A write's cost, from those that follow the last token."""
    return max(0.0, float(np.median([one.e2e_ms - one.chunks[-1][0] for one in group]))) / ENDING_WRITES


def _headers_ms(group: Sequence[Measured]) -> float | None:
    headers = [one.headers_ms for one in group if one.headers_ms is not None]
    return float(np.median(headers)) if headers else None


def _membership(groups: Sequence[Sequence[object]]) -> Vector:
    """A column for each group: 1 in the rows of its members."""
    return np.repeat(np.eye(len(groups)), [len(group) for group in groups], axis=0)


_SEEDS = 2
_PRIOR = 0.02
"""What it costs the search to be a factor of e away from where it starts: what the runs do not tell stays near there."""
_LAGS = (2, 50)
_NOTABLE_CORES = 0.25
"""Of other jobs: what is below leaves a measurement as it is."""
_ENOUGH_STEPS = 100
_TURNABOUTS = 2
"""The step and what other jobs do to it are found in turn."""
_TRIED = 41


def _persistence(rest: Vector) -> tuple[float, float]:
    """(lasting, memory) from the rank correlation of a series with itself at two distances."""
    if len(rest) < 4 * _LAGS[1]:
        return 0.0, 0.0
    score = norm.ppf((rankdata(rest) - 0.5) / len(rest))
    near, far = (max(0.0, float(np.mean(score[lag:] * score[:-lag]))) for lag in _LAGS)
    if near <= far or near == 0:
        return min(near, 0.9), 0.999 if near else 0.0
    memory = float((far / near) ** (1 / (_LAGS[1] - _LAGS[0]))) if far else 0.0
    return (min(0.95, near / memory ** _LAGS[0]), memory) if memory else (0.0, 0.0)


def _step_lines(groups: Sequence[Sequence[Measured]], cores: int) -> tuple[Vector, float, list[Vector], Machine]:
    """(a step of each group, a context token, what is left of each gap, how other jobs slow a step)."""
    rows = [
        [
            (one.prompt_tokens + before[1], one.other_cores, after[0] - before[0])
            for one in group
            for before, after in pairwise(one.chunks)
            if after[1] - before[1] == 1
        ]
        for group in groups
    ]
    if not all(rows):
        raise FitError("no request has two single-token chunks: there is no inter-token time to fit")
    context, others, gap = (np.array(column, float) for column in zip(*(row for group in rows for row in group), strict=True))
    member, machine = _membership(rows), Machine(cores)
    steps, token, rest = _stretched_lines(member, context, gap, _stretches(machine, others))
    if cores > 1 and _shows_other_jobs(others):
        for _ in range(_TURNABOUTS):
            machine = _slowed(cores, others, gap - token * context, member @ steps)
            steps, token, rest = _stretched_lines(member, context, gap, _stretches(machine, others))
    return steps, token, [rest[member[:, at] > 0] for at in range(len(groups))], machine


def _stretched_lines(member: Vector, context: Vector, gap: Vector, stretches: Vector) -> tuple[Vector, float, Vector]:
    found, rest = _least_deviations(np.column_stack([member * stretches[:, None], context]), gap)
    return np.array(found[:-1]), found[-1], rest


def _slowed(cores: int, others: Vector, taken: Vector, step: Vector) -> Machine:
    """The machine whose stretches of `step` deviate least from what was `taken`."""
    tried = [Machine(cores, round(float(wanted), 2)) for wanted in np.linspace(1, cores, _TRIED)]
    return min(tried, key=lambda machine: float(np.sum(np.abs(taken - step * _stretches(machine, others)))))


def _stretches(machine: Machine, others: Vector) -> Vector:
    levels, at = np.unique(others, return_inverse=True)
    return np.array([machine.engine_stretch(float(level)) for level in levels])[at]


def _shows_other_jobs(others: Sequence[float] | Vector) -> bool:
    """Enough steps beside other jobs, and enough without."""
    busy = int(np.sum(np.asarray(others) > _NOTABLE_CORES))
    return min(busy, len(others) - busy) >= _ENOUGH_STEPS


def _quiet(group: Sequence[Measured]) -> Sequence[Measured]:
    """Those that other jobs did not disturb; all, if those are fewer than half."""
    quiet = [one for one in group if one.other_cores <= _NOTABLE_CORES]
    return quiet if 2 * len(quiet) >= len(group) else group


def _first_row(one: Measured) -> tuple[float, float, float, float]:
    uncached = one.prompt_tokens - one.cached_tokens
    return one.prompt_tokens, uncached, uncached * (2 * one.cached_tokens + uncached + 1) / 2, one.ttft_ms


def _least_deviations(columns: Vector, target: Vector) -> tuple[list[float], Vector]:
    """Coefficients of at least 0 with the least sum of absolute deviations, and the deviations."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    weights = np.ones(len(target))
    for _ in range(_REWEIGHTS):
        found, _ = nnls(columns / scale * weights[:, None], target * weights)
        rest = target - columns / scale @ found
        weights = 1 / np.sqrt(np.maximum(np.abs(rest), 1e-3 * np.abs(target).mean() + 1e-12))
    return [float(value) for value in found / scale], rest


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
    turns: int


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
            shared.turns,
        ),
        _noise(alone.step_noise_ms, alone.lasting, alone.memory),
        _noise(alone.request_noise_ms),
        alone.machine,
        source,
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
    rounds: int = 2,
    cores: int = 0,
    say: Callable[[str], None] = lambda _text: None,
    source: str = "",
    turns: Sequence[int] = _TURNS,
) -> Fit:
    """Profiles of these runs. One of them must have concurrency 1.

    The search is local: `rounds` of it for each of `turns`, and as many again twice for the best. `cores` of the machine, 0 if
    they are not known: then other jobs slow nothing.
    """
    single: dict[str, list[Measured]] = {}
    for run in runs:
        if run.concurrency == 1:
            single.setdefault(run.group, []).extend(run.requests)
    if not single:
        raise FitError("no run with concurrency 1 among those to fit: it is what separates a step from the waiting around it")
    (pooled,) = lones([[one for group in single.values() for one in group]], cores)
    alone = dict(zip(single, lones(list(single.values()), cores), strict=True))
    others = [(run, alone.get(run.group, pooled)) for run in runs if run.concurrency != 1]
    best, least = _start(pooled), None
    if others:
        best, least = _Search(others, limits, seed, say).run(best, rounds, turns)
    else:
        say("no run with concurrency above 1: the cost of a decoding sequence is a guess (5 % of a step)")
    groups = {name: profile_of(one, best, f"{source}; {name}" if name else source) for name, one in alone.items()}
    return Fit(profile_of(pooled, best, source), groups, least)


def _start(alone: Lone) -> Shared:
    return Shared(
        0.05 * alone.step_ms, 0.1 * alone.first_ms, 0.25 * alone.first_ms, 0.5, 0.5, 1.0, 0.5 * alone.first_ms, _TURNS[0]
    )


class _Search:
    """The second stage: owns the runs it compares with, each with what a lone client showed in its surroundings."""

    def __init__(self, runs: Sequence[tuple[Run, Lone]], limits: EngineLimits, seed: int, say: Callable[[str], None]) -> None:
        # slow times move whole runs: they would drown what the search looks for
        self._runs = [(run, replace(alone, lasting=0.0), series(run)) for run, alone in runs]
        self._free = [name for name in _FREE if not all(_known(alone, name) for _run, alone in runs)]
        self._limits = limits
        self._seed = seed
        self._say = say

    def run(self, start: Shared, rounds: int, shapes: Sequence[int]) -> tuple[Shared, float]:
        """A descent for each number of turns, each from the best so far, and one twice as long for the best number."""
        turns, best = shapes[0], Found(np.zeros(len(self._free)), float("inf"))
        for shape in shapes:
            found = self._descend(start, best.point, shape, rounds)
            if found.cost < best.cost:
                turns, best = shape, found
        best = self._descend(start, best.point, turns, 2 * rounds)
        shared = self._at(start, best.point, turns)
        self._say(f"found {shared}")
        return shared, float(np.sum(self._rests(shared) ** 2))

    def _descend(self, start: Shared, first: Vector, turns: int, rounds: int) -> Found:
        def rests(point: Vector) -> Vector:
            return np.concatenate([self._rests(self._at(start, point, turns)), sqrt(_PRIOR) * point])

        found = descend(rests, first, rounds)
        self._say(f"turns {turns}: distance {found.cost:.4f}")
        return found

    def _at(self, start: Shared, point: Vector, turns: int) -> Shared:
        """`point`: logarithms of the factors from `start`."""
        values = {name: getattr(start, name) * float(np.exp(factor)) for name, factor in zip(self._free, point, strict=True)}
        return replace(start, **values, turns=turns)

    def _rests(self, shared: Shared) -> Vector:
        return np.concatenate(
            [
                rests(measured, series(replay(run, profile_of(alone, shared), self._limits, seed=self._seed + at)))
                for run, alone, measured in self._runs
                for at in range(_SEEDS)
            ]
        )


_FREE = ("decode_seq_ms", "frontend_step_ms", "wake_ms", "noise_growth", "contention", "chunk_factor", "request_ms")


def _known(alone: Lone, name: str) -> bool:
    """The lone client has shown it already."""
    return (name == "chunk_factor" and alone.chunk_ms > 0) or (name == "request_ms" and alone.headers_ms is not None)


def unseen(runs: Sequence[Run], fitted: Sequence[Run]) -> list[str]:
    """What is asked of the fit that its runs do not show."""
    lone = [one for run in fitted if run.concurrency == 1 for one in run.requests]
    asked = [one for run in runs for one in run.requests]
    prefill, shown = (max((one.prompt_tokens - one.cached_tokens for one in part), default=0) for part in (asked, lone))
    doubts = []
    if prefill > 2 * shown:
        doubts.append(
            f"prefill is a guess: a lone client was seen with at most {shown} uncached tokens, {prefill} are to be predicted"
        )
    others = max((one.other_cores for one in asked), default=0.0)
    if others > _NOTABLE_CORES and not _shows_other_jobs([one.other_cores for one in lone for _chunk in one.chunks]):
        doubts.append(
            f"what other jobs do to a step is a guess: a lone client hardly met any, up to {others:g} cores are given"
        )
    return doubts
