"""Least squares over a simulation: Gauss-Newton with damping (Levenberg, Marquardt).

The slopes are taken over steps so wide that the simulation's draws do not drown them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_WIDTH = 0.3
_LONGEST = 1.0
_FIRST_DAMPING = 0.1
_EASIER, _HARDER = 1 / 3, 5.0
_TRIES = 4
"""Of one set of slopes, each more damped."""


def descend(
    rests: Callable[[Vector], Vector], first: Vector, rounds: int, say: Callable[[str], None] = lambda _text: None
) -> Vector:
    """The best point of at most so many rounds from `first`; a round costs an evaluation for each coordinate and a few more."""
    point, here, damping = first, rests(first), _FIRST_DAMPING
    for number in range(1, rounds + 1):
        slopes = np.column_stack([(rests(point + _WIDTH * row) - here) / _WIDTH for row in np.eye(len(point))])
        for _ in range(_TRIES):
            next_point = point + _step(slopes, here, damping)
            there = rests(next_point)
            if there @ there < here @ here:
                point, here, damping = next_point, there, damping * _EASIER
                break
            damping *= _HARDER
        else:
            break
        say(f"round {number} of {rounds}: distance {here @ here:.4f}")
    return point


def _step(slopes: Vector, here: Vector, damping: float) -> Vector:
    normal = slopes.T @ slopes
    return np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ here), -_LONGEST, _LONGEST)
