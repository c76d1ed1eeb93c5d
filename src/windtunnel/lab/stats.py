"""Exact statistics for small counts. scipy is imported when first used, so that the command line starts fast.

Rates: Clopper and Pearson (1934). Two rates: Fisher's exact test, on effective counts where requests come in trials (Rao and
Scott 1992); the interval of their difference is Newcombe's hybrid of two Wilson intervals (1998, method 10). Means: Welch's
interval and a permutation test, exact when there are few arrangements.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from random import Random
from statistics import fmean, variance
from typing import NamedTuple

EXACT_ARRANGEMENTS = 50_000
RANDOM_ARRANGEMENTS = 20_000


class Interval(NamedTuple):
    low: float
    high: float


class Comparison(NamedTuple):
    """Control against treatment. `ci95` is of the difference control - treatment; None where it cannot be had."""

    control: float
    treatment: float
    difference: float
    ci95: Interval | None
    p_value: float
    test: str


def clopper_pearson(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a rate. Raises ValueError unless 0 <= successes <= total and total > 0."""
    from scipy.stats import beta

    _check_counts(successes, total)
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, total - successes + 1))
    high = 1.0 if successes == total else float(beta.ppf(1 - tail, successes + 1, total - successes))
    return Interval(low, high)


def wilson(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """The score interval of a rate."""
    from scipy.special import ndtri

    _check_counts(successes, total)
    z = float(ndtri((1 + confidence) / 2))
    rate, square = successes / total, z * z
    centre = (rate + square / (2 * total)) / (1 + square / total)
    half = z * math.sqrt(rate * (1 - rate) / total + square / (4 * total * total)) / (1 + square / total)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def compare_rates(control: tuple[int, int], treatment: tuple[int, int], confidence: float = 0.95) -> Comparison:
    """Two (successes, total) by Fisher's exact test, two-sided; the interval covers with `confidence`."""
    from scipy.stats import fisher_exact

    table = [[control[0], control[1] - control[0]], [treatment[0], treatment[1] - treatment[0]]]
    one, two = wilson(*control, confidence), wilson(*treatment, confidence)
    rate_one, rate_two = control[0] / control[1], treatment[0] / treatment[1]
    difference = rate_one - rate_two
    low = difference - math.hypot(rate_one - one.low, two.high - rate_two)
    high = difference + math.hypot(one.high - rate_one, rate_two - two.low)
    p_value = float(fisher_exact(table, alternative="two-sided")[1])
    return Comparison(rate_one, rate_two, difference, Interval(low, high), min(1.0, p_value), "Fisher exact, two-sided")


def compare_clustered(
    control: Sequence[tuple[int, int]], treatment: Sequence[tuple[int, int]], confidence: float = 0.95
) -> Comparison:
    """Two lists of (successes, total), one for each trial: what happens within a trial is not independent.

    Both arms' counts are divided by one design effect, the larger of what the spreads between their trials tell (Rao and Scott
    1992), and then compared as `compare_rates` does: an arm whose few trials happen to agree does not show that requests are
    independent. A single trial is one unit. Raises ValueError for an arm without a request.
    """
    sums = [(sum(hits for hits, _ in trials), sum(count for _, count in trials)) for trials in (control, treatment)]
    for hits, total in sums:
        _check_counts(hits, total)
    effect = _design_effect(control, treatment)
    effective = []
    for (hits, total), trials in zip(sums, (control, treatment), strict=True):
        units = 1 if len(trials) < 2 else max(1, round(total / effect))
        effective.append((round(hits / total * units), units))
    compared = compare_rates(effective[0], effective[1], confidence)
    rates = [hits / total for hits, total in sums]
    test = f"{compared.test}; {effective[0][1]} and {effective[1][1]} units (design effect of trials)"
    return compared._replace(control=rates[0], treatment=rates[1], difference=rates[0] - rates[1], test=test)


def _design_effect(*arms: Sequence[tuple[int, int]]) -> float:
    """How much wider rates spread between the trials of an arm than independent requests would; at least 1.

    What is beyond 1 is made larger by what Student's distribution has over the normal one: few trials tell it badly.
    """
    from scipy.special import ndtri, stdtrit

    beyond = max(_spread(trials) for trials in arms) - 1
    degrees = sum(len(trials) - 1 for trials in arms)
    if beyond <= 0 or not degrees:
        return 1.0
    return 1 + beyond * float(stdtrit(degrees, 0.975) / ndtri(0.975)) ** 2


def _spread(trials: Sequence[tuple[int, int]]) -> float:
    """The variance of one arm's rate by its trials, over what it is when requests are independent."""
    total = sum(count for _, count in trials)
    rate = sum(hits for hits, _ in trials) / total
    independent = rate * (1 - rate) / total
    if len(trials) < 2 or independent == 0:
        return 1.0
    spread = sum((some - rate * count) ** 2 for some, count in trials) / total**2
    return len(trials) / (len(trials) - 1) * spread / independent


def compare_means(control: Sequence[float], treatment: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Two samples by a permutation test of the difference of means, two-sided. Raises ValueError for an empty sample."""
    if not control or not treatment:
        raise ValueError("each arm needs at least one value")
    p_value, how = permutation_p(control, treatment, seed)
    mean_one, mean_two = fmean(control), fmean(treatment)
    ci95 = _welch(control, treatment, confidence) if min(len(control), len(treatment)) > 1 else None
    return Comparison(mean_one, mean_two, mean_one - mean_two, ci95, p_value, f"permutation of trials, {how}, two-sided")


def permutation_p(control: Sequence[float], treatment: Sequence[float], seed: int = 0) -> tuple[float, str]:
    """How often a random split of the pooled values has means at least as far apart, and how it was counted."""
    pooled, size = [*control, *treatment], len(control)
    observed = abs(fmean(control) - fmean(treatment)) - 1e-12
    total = sum(pooled)
    rest = len(pooled) - size

    def apart(chosen: Sequence[float]) -> bool:
        part = sum(chosen)
        return abs(part / size - (total - part) / rest) >= observed

    if math.comb(len(pooled), size) <= EXACT_ARRANGEMENTS:
        hits = [apart([pooled[index] for index in chosen]) for chosen in combinations(range(len(pooled)), size)]
        return sum(hits) / len(hits), "exact"
    random = Random(seed)
    count = sum(apart(random.sample(pooled, size)) for _ in range(RANDOM_ARRANGEMENTS))
    return (count + 1) / (RANDOM_ARRANGEMENTS + 1), f"{RANDOM_ARRANGEMENTS} random arrangements"


def paired_p(differences: Sequence[float], seed: int = 0) -> float:
    """One-sided: how often random signs make the sum of the differences at least as large. Exact when there are few pairs."""
    size = [abs(one) for one in differences]
    observed = sum(differences) - 1e-12
    if 2 ** len(size) <= EXACT_ARRANGEMENTS:
        sums = [0.0]
        for one in size:
            sums = [total + sign * one for total in sums for sign in (1, -1)]
        return sum(total >= observed for total in sums) / len(sums)
    random = Random(seed)
    hits = sum(sum(random.choice((1, -1)) * one for one in size) >= observed for _ in range(RANDOM_ARRANGEMENTS))
    return (hits + 1) / (RANDOM_ARRANGEMENTS + 1)


def _welch(control: Sequence[float], treatment: Sequence[float], confidence: float) -> Interval:
    from scipy.stats import t

    parts = [variance(values) / len(values) for values in (control, treatment)]
    difference = fmean(control) - fmean(treatment)
    error = math.sqrt(sum(parts))
    if error == 0:
        return Interval(difference, difference)
    weights = sum(part * part / (len(values) - 1) for part, values in zip(parts, (control, treatment), strict=True))
    half = float(t.ppf((1 + confidence) / 2, sum(parts) ** 2 / weights)) * error
    return Interval(difference - half, difference + half)


def _check_counts(successes: int, total: int) -> None:
    if total <= 0 or not 0 <= successes <= total:
        raise ValueError(f"{successes} of {total} is not a rate")
