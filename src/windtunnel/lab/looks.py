"""How small a p-value must be to stop at a look: a group-sequential design with error spending.

Lan and DeMets (1983) with their spending function of O'Brien and Fleming's type: almost nothing is spent early, and nearly all
of alpha is left for the last look. The levels are those of a Brownian motion (Armitage, McPherson and Rowe 1969: what has not
stopped is carried from look to look) and are applied to the p-values of the tests at hand, as Jennison and Turnbull (2000) do
in their significance level approach. So the looks together are exact for large samples only. For small ones the tests at hand
lean to the safe side, and there is no look before `LEAST_TRIALS`: `tests/lab/test_sequential.py` sums up and simulates that.
"""

from collections.abc import Sequence
from functools import lru_cache

LEAST_TRIALS = 4
"""Before a look: fewer trials, in each of which all requests share one fate, agree by chance in more than 1 of 100 runs."""
_NODES = 80
"""Of the quadrature; 40 give the same levels to six digits."""


def looks_at(trials: int, looks: int) -> tuple[int, ...]:
    """After how many trials of each arm there is a look; the last is the end, whatever its number."""
    due = {trials * look // looks for look in range(1, looks + 1)}
    return tuple(sorted(one for one in due if one >= LEAST_TRIALS or one == trials))


def level_at(trials_done: int, trials: int, looks: int, alpha: float) -> float | None:
    """The least p-value that does not stop after so many trials of each arm; None where no look is due."""
    due = looks_at(trials, looks)
    return levels(tuple(one / trials for one in due), alpha)[due.index(trials_done)] if trials_done in due else None


@lru_cache(64)
def levels(fractions: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The level of each look, two-sided; `fractions` of the planned information rise to 1."""
    import numpy
    from scipy.optimize import brentq
    from scipy.special import ndtr

    unit, weight = numpy.polynomial.legendre.leggauss(_NODES)
    at, mass, before, out = numpy.zeros(1), numpy.ones(1), 0.0, []
    for fraction in fractions:
        step = (fraction - before) ** 0.5
        due = _spent(fraction, alpha) - (_spent(before, alpha) if before else 0.0)

        edge = brentq(lambda edge: mass @ (ndtr((at - edge) / step) + ndtr((-at - edge) / step)) - due, 0.0, 12.0)  # noqa: B023
        out.append(2 * float(ndtr(-edge / fraction**0.5)))
        here = unit * edge
        density = numpy.exp(-0.5 * ((here[:, None] - at) / step) ** 2) @ mass / (step * (2 * numpy.pi) ** 0.5)
        at, mass, before = here, density * weight * edge, fraction
    return tuple(out)


def _spent(fraction: float, alpha: float) -> float:
    """Of alpha, half on each side, up to this fraction of the information."""
    from scipy.special import ndtr, ndtri

    return 4 * float(ndtr(ndtri(alpha / 4) / fraction**0.5))
