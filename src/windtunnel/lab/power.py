"""How many trials an experiment needs: exact power for rates from nothing, and the least trials of a permutation test.

Rates: a clean arm harms nobody, so the control's count follows a binomial and is significant from some least count on
(Fisher's exact test, two-sided); the power is the chance to reach it. Means: two arms of `n` trials that do not overlap at
all have p = 2 / C(2n, n), which bounds `n` from below.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from windtunnel.lab.stats import compare_rates

LIMIT = 20_000
RATES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
POWERS = (0.8, 0.95)


class Need(NamedTuple):
    """So many requests per arm find a rate with this chance; `trials` of an experiment hold as many."""

    rate: float
    power: float
    requests: int
    trials: int


def least_significant(requests: int, alpha: float) -> int | None:
    """The least count out of `requests` that differs from none out of as many."""
    for hits in range(1, min(requests, 60) + 1):
        if compare_rates((hits, requests), (0, requests)).p_value < alpha:
            return hits
    return None


def power_from_nothing(requests: int, rate: float, alpha: float) -> float:
    """The chance to tell a rate from none with so many requests in each arm."""
    from scipy.stats import binom

    hits = least_significant(requests, alpha)
    return 0.0 if hits is None else float(binom.sf(hits - 1, requests, rate))


def requests_needed(rate: float, power: float, alpha: float) -> int | None:
    """The least number per arm with that power (to 1 in 20); None beyond `LIMIT`."""
    low, high = 1, 4
    while power_from_nothing(high, rate, alpha) < power:
        low, high = high, high * 2
        if high > LIMIT:
            return None
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (low, middle) if power_from_nothing(middle, rate, alpha) >= power else (middle, high)
    return high


def needs(per_trial: int, alpha: float) -> list[Need]:
    """For each rate and power, the requests and trials of each arm."""
    out = []
    for rate in RATES:
        for power in POWERS:
            requests = requests_needed(rate, power, alpha)
            if requests is not None:
                out.append(Need(rate, power, requests, -(-requests // max(per_trial, 1))))
    return out


def least_trials(alpha: float) -> int:
    """The least trials of each arm with which a permutation test can be significant at all."""
    return next(count for count in range(2, 100) if 2 / math.comb(2 * count, count) < alpha)


def per_trial_of(plan_counts: Mapping[str, int], of: str | None) -> int:
    """How many requests of the effect's kind one trial sends; 0 when that is not known beforehand."""
    return plan_counts.get((of or "").removesuffix(".sent"), 0)
