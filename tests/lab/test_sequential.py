"""Stopping early does not inflate the error, and finds more than equal shares of alpha.

Where a trial is one yes or no, the chance of a false effect is summed up exactly over all courses of a run; where its requests
share a part of their fate, runs are drawn with fixed seeds.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from scipy.special import ndtri
from scipy.stats import binom
from tests.lab.conftest import EXPERIMENT

from windtunnel.lab.experiment import Options, _level, _significant_already
from windtunnel.lab.experiment_file import ArmName, Effect, parse
from windtunnel.lab.looks import level_at, levels, looks_at
from windtunnel.lab.stats import compare_clustered, compare_rates, permutation_p
from windtunnel.lab.verdict import decide, effect_document

RUNS, TRIALS, LOOKS, ALPHA = 300, 10, 5, 0.05
PER_TRIAL = 30
DUE = looks_at(TRIALS, LOOKS)
FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


def test_levels_are_those_of_the_published_boundary() -> None:
    """Two-sided 5 %, five equal looks (DeMets and Lan 1994)."""
    boundary = [-float(ndtri(level / 2)) for level in levels(FIFTHS, 0.05)]
    assert boundary == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=6e-4)
    assert levels((1.0,), 0.05) == pytest.approx((0.05,))


def test_a_look_is_due_after_equal_parts() -> None:
    assert looks_at(20, 5) == (4, 8, 12, 16, 20)
    assert looks_at(13, 3) == (4, 8, 13)
    assert looks_at(6, 20) == (4, 5, 6)
    assert level_at(3, 10, 5, 0.05) is None
    assert level_at(10, 10, 1, 0.05) == pytest.approx(0.05)


def test_there_is_no_look_at_less_than_four_trials_but_the_last() -> None:
    assert looks_at(10, 5) == (4, 6, 8, 10)
    assert looks_at(3, 3) == (3,)
    assert level_at(2, 3, 3, 0.05) is None
    assert level_at(3, 3, 3, 0.05) == pytest.approx(0.05)


def test_levels_spend_alpha_and_no_more() -> None:
    """By simulation of the motion itself: who crosses at any look, under no drift."""
    random, bounds = Random(1), [-float(ndtri(level / 2)) for level in levels(FIFTHS, 0.2)]
    crossed, walks = 0, 20_000
    for _ in range(walks):
        at, seen = 0.0, False
        for look, bound in enumerate(bounds, 1):
            at += random.gauss(0, 1)
            seen |= abs(at) / look**0.5 >= bound
        crossed += seen
    assert crossed / walks == pytest.approx(0.2, abs=0.009)


YesOrNo = Callable[[int, int, int], float]
"""The p-value after so many trials of each arm, of which so many of the control and of the treatment said yes."""


@cache
def mean_p(control: int, treatment: int, trials: int) -> float:
    """A finding that is made in a trial or not."""
    return permutation_p(*([1.0] * yes + [0.0] * (trials - yes) for yes in (control, treatment)))[0]


@cache
def rate_p(control: int, treatment: int, trials: int) -> float:
    """Either all of a trial's requests are harmed, or none."""
    arms = ([(PER_TRIAL, PER_TRIAL)] * yes + [(0, PER_TRIAL)] * (trials - yes) for yes in (control, treatment))
    return compare_clustered(*arms).p_value


def chance_of_a_false_effect(p_value: YesOrNo, trials: int, looks: int, rate: float) -> float:
    """Exact: over all courses that a run of equal arms can take."""
    going, stopped, before = {(0, 0): 1.0}, 0.0, 0
    for look in looks_at(trials, looks):
        level, step = level_at(look, trials, looks, ALPHA), look - before
        chances = [float(binom.pmf(yes, step, rate)) for yes in range(step + 1)]
        after: dict[tuple[int, int], float] = {}
        for ((one, two), mass), more, others in product(going.items(), range(step + 1), range(step + 1)):
            at = (one + more, two + others)
            after[at] = after.get(at, 0.0) + mass * chances[more] * chances[others]
        assert level is not None
        going = {at: mass for at, mass in after.items() if p_value(*at, look) >= level}
        stopped, before = stopped + sum(after.values()) - sum(going.values()), look
    return stopped


@pytest.mark.parametrize("p_value", [mean_p, rate_p])
@pytest.mark.parametrize("trials", [3, 4, 5, 6, 8])
def test_equal_arms_seldom_differ_when_a_trial_is_one_yes_or_no(p_value: YesOrNo, trials: int) -> None:
    chances = [chance_of_a_false_effect(p_value, trials, looks, rate) for looks in (1, 2, 3, 5) for rate in (0.05, 0.2, 0.5)]
    assert max(chances) <= ALPHA


def test_two_trials_agree_by_chance() -> None:
    """Which is why there is no look at so few; what `--trials 2` says is worth as much."""
    assert chance_of_a_false_effect(rate_p, 2, 1, 0.5) == pytest.approx(0.125)


def a_trial(random: Random, rate: float, shared: float) -> tuple[int, int]:
    """(harmed, sent). `shared`: the correlation between two requests of it (beta-binomial)."""
    spread = (1 - shared) / shared if shared else 0.0
    own = random.betavariate(rate * spread, (1 - rate) * spread) if shared else rate
    return sum(random.random() < own for _ in range(PER_TRIAL)), PER_TRIAL


@cache
def p_values(seed: int, control: float, treatment: float, shared: float) -> list[float]:
    """At the looks of one run."""
    random = Random(seed)
    pairs = [(a_trial(random, control, shared), a_trial(random, treatment, shared)) for _ in range(TRIALS)]
    arms = list(zip(*pairs, strict=True))
    return [compare_clustered(arms[0][:look], arms[1][:look]).p_value for look in DUE]


def share_called_different(control: float, treatment: float, allowed: list[float], shared: float = 0.0) -> float:
    runs = [p_values(seed, control, treatment, shared) for seed in range(RUNS)]
    return sum(any(p < level for p, level in zip(run, allowed, strict=True)) for run in runs) / RUNS


SPENT = list(levels(tuple(look / TRIALS for look in DUE), ALPHA))
EVEN = [ALPHA / len(DUE)] * len(DUE)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.1, 0.3])
def test_the_looks_keep_the_error_below_alpha(shared: float) -> None:
    assert share_called_different(0.5, 0.5, SPENT, shared) <= ALPHA
    assert share_called_different(0.3, 0.3, SPENT, shared) <= ALPHA


@pytest.mark.slow
def test_looks_at_full_alpha_err_more_often() -> None:
    """So the test above can fail."""
    assert share_called_different(0.5, 0.5, [ALPHA] * len(DUE)) > ALPHA


@pytest.mark.slow
def test_more_is_found_than_with_equal_shares_of_alpha() -> None:
    """On the same runs: half of 300 requests against six in ten."""
    assert share_called_different(0.5, 0.6, SPENT) > share_called_different(0.5, 0.6, EVEN) + 0.05


def test_a_run_stops_at_the_level_of_its_look() -> None:
    """A p-value of 2e-3 does not stop at the first look and does at the second; the verdict uses the same level."""
    fake = parse(EXPERIMENT.format(server="true"), "fake.toml").model_copy(update={"trials": TRIALS})
    options = Options(looks=LOOKS)

    def trials(pairs: int) -> dict[ArmName, list[dict[str, Any]]]:
        alike = [{"error": None, "interrupted": None, "bystanders": {"harmed": hits, "sent": 60}} for hits in (12, 6)]
        return {"control": [alike[0]] * pairs, "treatment": [alike[1]] * pairs}

    assert SPENT[0] < compare_rates((48, 240), (24, 240)).p_value < SPENT[1]
    assert [pairs for pairs in range(1, TRIALS + 1) if _significant_already(fake, options, trials(pairs))] == [6, 8, 10]
    effect = effect_document(fake.effect, trials(4)["control"], trials(4)["treatment"])
    for pairs, verdict in ((4, "inconclusive"), (6, "confirmed")):
        at_look = {**effect, "level": _level(fake, options, trials(pairs), ALPHA)}
        assert decide([True], at_look, complete=True)[0] == verdict


def test_the_interval_of_a_look_is_wider() -> None:
    effect = Effect(metric="bystanders.harmed", of="bystanders.sent")
    trial = {"error": None, "interrupted": None, "bystanders": {"harmed": 20, "sent": 60}}
    plain, wide = (effect_document(effect, [trial] * 4, [trial] * 4, one)["ci95"] for one in (0.95, 0.999))
    assert wide[0] < plain[0] < 0 < plain[1] < wide[1]
