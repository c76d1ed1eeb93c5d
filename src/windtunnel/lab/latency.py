"""Are others served more slowly while and after clients leave than without a storm?

A pair is one round of survivors beside victims (`Role.SURVIVOR`) and one round of equal streams without any (`Role.CALM`), one
right after the other in an order drawn from the seed. Compared is the mean gap between the tokens of a stream: among victims
from their first leaving on. Other work on the machine meets both arms of a pair alike, so the unit is the pair, and signs are
exchanged within pairs. Slower means: at the median of the pairs by both a factor and a least time, and the permutation test of
the pairs says so at 0.1 %, which takes ten pairs.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from windtunnel.core.units import MS
from windtunnel.lab.plan import Role
from windtunnel.lab.record import StormResult, StreamRecord
from windtunnel.lab.stats import paired_p

ALPHA = 0.001
FACTOR = 2.0
LEAST_ITL_MS = 4.0
_MIN_GAPS = 4
_MIN_GAPS_OF_A_PAIR = 12
"""A mean over fewer is the noise of single gaps."""


class Spread(NamedTuple):
    """Medians over streams, in milliseconds; None without any."""

    ttft_ms: float | None
    itl_ms: float | None


class Pair(NamedTuple):
    """Mean gaps of one round, in milliseconds."""

    calm_ms: float
    storm_ms: float


def ttft_ms(streams: Sequence[StreamRecord]) -> list[float]:
    return [(stream.frame_ns[0] - stream.started_ns) / MS for stream in streams if stream.frame_ns]


def itl_ms(streams: Sequence[StreamRecord]) -> list[float]:
    """The median gap of each stream that has enough gaps."""
    return [median(gaps) for stream in streams if len(gaps := _gaps_ms(stream, 0)) >= _MIN_GAPS]


def _gaps_ms(stream: StreamRecord, since_ns: int) -> list[float]:
    """The gaps that end after `since_ns`."""
    return [(two - one) / MS for one, two in pairwise(stream.frame_ns) if two >= since_ns]


def spread(streams: Sequence[StreamRecord]) -> Spread:
    first, gaps = ttft_ms(streams), itl_ms(streams)
    return Spread(median(first) if first else None, median(gaps) if gaps else None)


def pairs_of(result: StormResult) -> list[Pair]:
    """One for each round that has both arms and a victim that left."""
    out = []
    for round_ in sorted({stream.ask.round for stream in result.of(Role.CALM)}):
        left = [one.left_ns for one in result.of(Role.VICTIM) if one.ask.round == round_ and one.left_ns is not None]
        calm, storm = (_mean_ms(result, role, round_, min(left, default=0)) for role in (Role.CALM, Role.SURVIVOR))
        if calm is not None and storm is not None and left:
            out.append(Pair(calm, storm))
    return out


def _mean_ms(result: StormResult, role: Role, round_: int, left_ns: int) -> float | None:
    since_ns = left_ns if role is Role.SURVIVOR else 0
    streams = [stream for stream in result.of(role) if stream.ask.round == round_]
    means = [fmean(gaps) for stream in streams if len(gaps := _gaps_ms(stream, since_ns)) >= _MIN_GAPS_OF_A_PAIR]
    return median(means) if means else None


def slowdowns(result: StormResult) -> list[str]:
    """One sentence when survivors are slower."""
    pairs = pairs_of(result)
    if not pairs:
        return []
    p_value = paired_p([pair.storm_ms - pair.calm_ms for pair in pairs])
    more_ms = median(pair.storm_ms - pair.calm_ms for pair in pairs)
    factor = median(pair.storm_ms / max(pair.calm_ms, 1e-6) for pair in pairs)
    if p_value > ALPHA or more_ms < LEAST_ITL_MS or factor < FACTOR:
        return []
    calm, storm = (median(values) for values in zip(*pairs, strict=True))
    return [
        f"survivors' gaps between tokens: {storm:.1f} ms in {len(pairs)} rounds with victims, {calm:.1f} ms in as many without"
        f" (median of the pairs: {factor:.1f} times, {more_ms:+.1f} ms; p = {p_value:.2g})"
    ]
