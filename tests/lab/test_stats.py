"""Statistics against published or hand-computed values."""

import math

import pytest

from windtunnel.lab.stats import (
    clopper_pearson,
    compare_clustered,
    compare_means,
    compare_rates,
    paired_p,
    permutation_p,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (81, 263, 0.2527, 0.3676),
    ],
)
def test_clopper_pearson(successes: int, total: int, low: float, high: float) -> None:
    """81 of 263: Newcombe (1998), table I, exact method."""
    assert clopper_pearson(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_wilson() -> None:
    """81 of 263: Newcombe (1998), table I, score method."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_compare_rates_agrees_with_newcombe_and_fisher() -> None:
    """56 of 70 against 48 of 80: Newcombe (1998), method 10: 0.0524 to 0.3339."""
    result = compare_rates((56, 70), (48, 80))
    assert result.difference == pytest.approx(0.2)
    assert result.ci95 == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_fisher_tea_tasting() -> None:
    """Fisher (1935): three of four cups right, two-sided 34/70."""
    assert compare_rates((3, 4), (1, 4)).p_value == pytest.approx(34 / 70)


def test_cancelled_streams_of_the_investigation() -> None:
    result = compare_rates((20, 120), (0, 120))
    assert result.p_value == pytest.approx(2 * math.comb(120, 20) / math.comb(240, 20), rel=1e-6)


def test_permutation_is_exact_for_few_values() -> None:
    assert permutation_p([10, 11, 12], [1, 2, 3]) == (2 / 20, "exact")
    assert permutation_p([1, 1, 1], [1, 1, 1]) == (1.0, "exact")


def test_permutation_samples_many_values_with_the_seed() -> None:
    one, two = list(range(20)), list(range(10, 30))
    first = permutation_p(one, two, seed=7)
    assert first == permutation_p(one, two, seed=7)
    assert 0 < first[0] < 0.01
    assert "random" in first[1]


def test_compare_means() -> None:
    result = compare_means([10, 12, 14], [1, 2, 3])
    assert (result.control, result.treatment, result.difference) == (12, 2, 10)
    assert result.ci95 is not None
    assert result.ci95.low < 10 < result.ci95.high
    assert compare_means([1], [2]).ci95 is None
    assert compare_means([2, 2], [1, 1]).ci95 == (1, 1)


@pytest.mark.parametrize("counts", [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        clopper_pearson(*counts)


def test_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        compare_means([], [1])


def test_requests_of_one_trial_are_not_independent() -> None:
    """All or nothing in each trial: a trial is one unit at most (design effect 2/1 * 0.125 / 0.0125 = 20, in both arms)."""
    clustered = compare_clustered([(0, 10), (10, 10)], [(0, 10), (0, 10)])
    assert clustered.test.endswith("1 and 1 units (design effect of trials)")
    assert clustered.difference == 0.5
    assert clustered.p_value > 0.05 > compare_rates((10, 20), (0, 20)).p_value
    even = compare_clustered([(6, 40), (7, 40), (7, 40)], [(0, 40)] * 3)
    assert even.p_value == compare_rates((20, 120), (0, 120)).p_value
    assert compare_clustered([(40, 40)], [(0, 40)]).p_value == 1.0


def test_pairs_are_tested_by_their_signs() -> None:
    assert paired_p([1] * 10) == 2**-10
    assert paired_p([1, 2, -4]) == 5 / 8
    assert paired_p([0, 0]) == 1.0
    assert 0 < paired_p([1.0] * 30) < 0.001
