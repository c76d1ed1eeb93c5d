"""Least squares over a simulation: it finds what can be found, and what it returns is never worse than where it began."""

import numpy as np
import pytest

from windtunnel.sim.calibrate.search import Vector, descend

TRUTH = np.array([0.7, -1.3])


def curved(point: Vector) -> Vector:
    """Rests of a model that is not linear; 0 at the truth."""
    growth, level = point
    times = np.linspace(0, 1, 12)
    return np.exp(growth * times) + level - (np.exp(TRUTH[0] * times) + TRUTH[1])


def test_it_finds_the_truth_and_says_how_far_it_is() -> None:
    said: list[str] = []
    found = descend(curved, np.zeros(2), 12, said.append)
    assert found == pytest.approx(TRUTH, abs=0.02)
    assert said[0].startswith("round 1 of 12: distance ") and 1 < len(said) <= 12


def test_draws_do_not_lead_it_away() -> None:
    def noisy(point: Vector) -> Vector:
        chance = np.random.default_rng(int(1e6 * abs(point[0]) + 1e3 * abs(point[1])))
        return curved(point) + chance.normal(0, 0.02, 12)

    assert descend(noisy, np.zeros(2), 12) == pytest.approx(TRUTH, abs=0.2)


def test_where_no_step_is_better_it_stays() -> None:
    evaluations = []

    def at_its_best(point: Vector) -> Vector:
        evaluations.append(point)
        return np.array([1.0 + abs(point[0]), 1.0 + abs(point[1])])

    assert list(descend(at_its_best, np.zeros(2), 50)) == [0.0, 0.0]
    assert len(evaluations) < 10
