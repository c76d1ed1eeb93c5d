"""Stopping early does not inflate the error, and finds more than equal shares of alpha: many runs with looks in between."""

from functools import cache
from random import Random
from typing import Any

import pytest
from scipy.special import ndtri
from tests.lab.conftest import EXPERIMENT

from windtunnel.lab.experiment import Options, _level, _significant_already
from windtunnel.lab.experiment_file import ArmName, Effect, parse
from windtunnel.lab.looks import level_at, levels, looks_at
from windtunnel.lab.stats import compare_rates
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
    assert looks_at(10, 5) == (2, 4, 6, 8, 10)
    assert looks_at(7, 3) == (2, 4, 7)
    assert looks_at(3, 20) == (1, 2, 3)
    assert level_at(3, 10, 5, 0.05) is None
    assert level_at(10, 10, 1, 0.05) == pytest.approx(0.05)


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


def a_trial(random: Random, rate: float) -> dict[str, Any]:
    harmed = sum(random.random() < rate for _ in range(PER_TRIAL))
    return {"error": None, "interrupted": None, "bystanders": {"harmed": harmed, "sent": PER_TRIAL}}


@cache
def p_values(seed: int, control: float, treatment: float) -> list[float]:
    """At the looks of one run."""
    random, effect = Random(seed), Effect(metric="bystanders.harmed", of="bystanders.sent")
    arms: tuple[list[dict[str, Any]], ...] = ([], [])
    out = []
    for number in range(1, TRIALS + 1):
        for arm, rate in zip(arms, (control, treatment), strict=True):
            arm.append(a_trial(random, rate))
        if number in DUE:
            out.append(effect_document(effect, *arms)["p_value"])
    return out


def share_called_different(control: float, treatment: float, allowed: list[float]) -> float:
    runs = [p_values(seed, control, treatment) for seed in range(RUNS)]
    return sum(any(p < level for p, level in zip(run, allowed, strict=True)) for run in runs) / RUNS


SPENT = list(levels(FIFTHS, ALPHA))
EVEN = [ALPHA / LOOKS] * LOOKS


@pytest.mark.slow
def test_five_looks_keep_the_error_below_alpha() -> None:
    assert share_called_different(0.5, 0.5, SPENT) <= ALPHA
    assert share_called_different(0.5, 0.5, [ALPHA] * LOOKS) > ALPHA  # so this can fail


@pytest.mark.slow
def test_more_is_found_than_with_equal_shares_of_alpha() -> None:
    """On the same runs: half of 300 requests against six in ten."""
    assert share_called_different(0.5, 0.6, SPENT) > share_called_different(0.5, 0.6, EVEN) + 0.05


def test_a_run_stops_at_the_level_of_its_look() -> None:
    """At the first look a p-value of 1e-5 does not stop, at a later one it does; the verdict uses the same level."""
    fake = parse(EXPERIMENT.format(server="true"), "fake.toml").model_copy(update={"trials": TRIALS})
    options = Options(looks=LOOKS)

    def trials(pairs: int) -> dict[ArmName, list[dict[str, Any]]]:
        alike = [{"error": None, "interrupted": None, "bystanders": {"harmed": hits, "sent": 60}} for hits in (21, 6)]
        return {"control": [alike[0]] * pairs, "treatment": [alike[1]] * pairs}

    assert compare_rates((42, 120), (12, 120)).p_value < 1e-4
    assert [pairs for pairs in range(1, TRIALS + 1) if _significant_already(fake, options, trials(pairs))] == [4, 6, 8, 10]
    effect = effect_document(fake.effect, trials(2)["control"], trials(2)["treatment"])
    for pairs, verdict in ((2, "inconclusive"), (4, "confirmed")):
        at_look = {**effect, "level": _level(fake, options, trials(pairs), ALPHA)}
        assert decide([True], at_look, complete=True)[0] == verdict


def test_the_interval_of_a_look_is_wider() -> None:
    effect = Effect(metric="bystanders.harmed", of="bystanders.sent")
    trial = {"error": None, "interrupted": None, "bystanders": {"harmed": 20, "sent": 60}}
    plain, wide = (effect_document(effect, [trial] * 4, [trial] * 4, one)["ci95"] for one in (0.95, 0.999))
    assert wide[0] < plain[0] < 0 < plain[1] < wide[1]
