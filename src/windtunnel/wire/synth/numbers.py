"""A number for `minimum`, `maximum`, their exclusive forms and `multipleOf`."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.merge import Impossible
from windtunnel.wire.synth.validate import multiple_of

_SPAN = 100


def number(flat: Mapping[str, Any], draw: Draw, *, integer: bool) -> int | float:
    """Raises Impossible when no candidate fits."""
    fits = [value for value in _candidates(flat, draw, integer) if _fits(value, flat, integer)]
    if not fits:
        raise Impossible
    return fits[0]


def _fits(value: float, flat: Mapping[str, Any], integer: bool) -> bool:
    return (
        (not integer or float(value).is_integer())
        and value >= flat.get("minimum", -math.inf)
        and value <= flat.get("maximum", math.inf)
        and value > flat.get("exclusiveMinimum", -math.inf)
        and value < flat.get("exclusiveMaximum", math.inf)
        and ("multipleOf" not in flat or multiple_of(value, flat["multipleOf"]))
    )


def _candidates(flat: Mapping[str, Any], draw: Draw, integer: bool) -> Iterator[int | float]:
    low = max((flat[key] for key in ("minimum", "exclusiveMinimum") if key in flat), default=None)
    high = min((flat[key] for key in ("maximum", "exclusiveMaximum") if key in flat), default=None)
    step = flat.get("multipleOf", 1)
    yield from _multiples(low, high, step, draw)
    if integer and not isinstance(step, int):
        yield from _multiples(low, high, math.ceil(step), draw)
    if not integer and low is not None and high is not None:
        yield from (low + (high - low) * part / 8 for part in range(9))
    for bound in (low, high):
        if bound is not None and not integer:
            yield from (bound, bound + 0.5, bound - 0.5)
    yield 0


def _multiples(low: float | None, high: float | None, step: float, draw: Draw) -> Iterator[int | float]:
    """Multiples of `step` in the range, beginning at a drawn one."""
    exact = Fraction(step)
    first = None if low is None else math.ceil(Fraction(low) / exact)
    last = None if high is None else math.floor(Fraction(high) / exact)
    if first is None:
        first = 0 if last is None or last >= 0 else last - _SPAN
    if last is None:
        last = first + _SPAN
    if last < first:
        return
    start = draw.below(min(last - first, _SPAN) + 1)
    for offset in range(min(last - first, _SPAN) + 1):
        factor = first + (start + offset) % (min(last - first, _SPAN) + 1)
        yield factor * step
    yield from (last * step, first * step)
