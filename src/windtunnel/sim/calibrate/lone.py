"""What the runs of a lone client show directly: regressions on medians, and what they leave over.

With one request at a time an inter-token gap is one step, so a regression of gaps on context gives the base and the context
cost; the time to first token, less such a step, gives the front end's request cost and the prefill costs; what the regressions
leave over is the noise. The writes after the last token give the cost of a chunk, the response headers the loop's work for a
request. Steps beside other jobs of the machine show how many cores a step wants. The regressions minimise absolute deviations:
medians, so that stalls do not pull the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import norm, rankdata

from windtunnel.core.frontend import ENDING_WRITES
from windtunnel.core.machine import Machine
from windtunnel.sim.calibrate.measured import Measured, Run

Vector = NDArray[np.float64]

_REWEIGHTS = 60


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


def lones(groups: Sequence[Sequence[Run]], cores: int = 0) -> list[Lone]:
    """What each group of runs shows. Costs of a context token, a prompt token and prefill are the server's: of all groups."""
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
            _chunk_ms(_requests(group)),
            _headers_ms(_requests(group)),
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


_LAGS = (2, 50)
_NOTABLE_CORES = 0.25
"""Of other jobs: what is below leaves a measurement as it is."""
_ENOUGH_STEPS = 100
_TRIED = 41
_STALL = 4.0


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


def _step_lines(groups: Sequence[Sequence[Run]], cores: int) -> tuple[Vector, float, list[Vector], Machine]:
    """(a step of each group, a context token, what is left of each gap, how other jobs slow a step)."""
    rows = [
        [
            (one.prompt_tokens + before[1], run.other_cores_at(one.sent_s + after[0] / 1e3), after[0] - before[0])
            for run in group
            for one in run.requests
            for before, after in pairwise(one.chunks)
            if after[1] - before[1] == 1
        ]
        for group in groups
    ]
    if not all(rows):
        raise FitError("no request has two single-token chunks: there is no inter-token time to fit")
    context, others, gap = (np.array(column, float) for column in zip(*(row for group in rows for row in group), strict=True))
    member, machine = _membership(rows), Machine(cores)
    if cores > 1 and _shows_other_jobs(others):
        quiet = others <= _NOTABLE_CORES
        steps, token, _rest = _stretched_lines(member[quiet], context[quiet], gap[quiet], np.ones(int(quiet.sum())))
        machine = _slowed(cores, others, gap - token * context, member @ steps)
    steps, token, rest = _stretched_lines(member, context, gap, _stretches(machine, others))
    return steps, token, [rest[member[:, at] > 0] for at in range(len(groups))], machine


def _stretched_lines(member: Vector, context: Vector, gap: Vector, stretches: Vector) -> tuple[Vector, float, Vector]:
    found, rest = _least_deviations(np.column_stack([member * stretches[:, None], context]), gap)
    return np.array(found[:-1]), found[-1], rest


def _slowed(cores: int, others: Vector, taken: Vector, step: Vector) -> Machine:
    """The machine whose stretches of `step` explain best what was `taken` on average.

    Means, because a job that runs half of the time leaves the median step as it is; a stall counts as `_STALL` steps.
    """
    rest = np.minimum(taken, _STALL * step) - step
    rest -= rest[others <= _NOTABLE_CORES].mean()
    tried = [Machine(cores, round(float(wanted), 2)) for wanted in np.linspace(1, cores, _TRIED)]
    return min(tried, key=lambda machine: float(np.sum((rest - step * (_stretches(machine, others) - 1)) ** 2)))


def _stretches(machine: Machine, others: Vector) -> Vector:
    levels, at = np.unique(others, return_inverse=True)
    return np.array([machine.engine_stretch(float(level)) for level in levels])[at]


def _shows_other_jobs(others: Sequence[float] | Vector) -> bool:
    """Enough steps beside other jobs, and enough without."""
    busy = int(np.sum(np.asarray(others) > _NOTABLE_CORES))
    return min(busy, len(others) - busy) >= _ENOUGH_STEPS


def _requests(group: Sequence[Run]) -> list[Measured]:
    return [one for run in group for one in run.requests]


def _quiet(group: Sequence[Run]) -> list[Measured]:
    """Requests whose first token other jobs did not disturb; all, if those are fewer than half."""
    quiet = [one for run in group for one in run.requests if run.other_cores_at(one.sent_s) <= _NOTABLE_CORES]
    return quiet if 2 * len(quiet) >= sum(len(run.requests) for run in group) else _requests(group)


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


def unseen(runs: Sequence[Run], fitted: Sequence[Run]) -> list[str]:
    """What is asked of the fit that its runs do not show."""
    lone = [run for run in fitted if run.concurrency == 1]
    prefill, shown = (
        max((one.prompt_tokens - one.cached_tokens for one in _requests(part)), default=0) for part in (runs, lone)
    )
    doubts = []
    if prefill > 2 * shown:
        doubts.append(
            f"prefill is a guess: a lone client was seen with at most {shown} uncached tokens, {prefill} are to be predicted"
        )
    others = max((run.other_cores_at(one.sent_s) for run in runs for one in run.requests), default=0.0)
    met = [run.other_cores_at(one.sent_s) for run in lone for one in run.requests for _chunk in one.chunks]
    if others > _NOTABLE_CORES and not _shows_other_jobs(met):
        doubts.append(
            f"what other jobs do to a step is a guess: a lone client hardly met any, up to {others:g} cores are given"
        )
    return doubts
