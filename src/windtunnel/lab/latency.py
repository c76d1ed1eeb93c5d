"""Are others served more slowly after clients have left than without a storm?

Compared are streams before the storm (`Role.CALM`) with, in the same storm, the gaps between tokens of survivors once the last
victim has left, and the first tokens of later streams. Slower means: the median is worse by both a factor and a least
time, and a permutation test over streams (not tokens) says so at 1 %.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from windtunnel.core.units import MS
from windtunnel.lab.plan import Role
from windtunnel.lab.record import StormResult, StreamRecord
from windtunnel.lab.stats import permutation_p

ALPHA = 0.01
FACTOR = 2.0
LEAST_ITL_MS = 10.0
LEAST_TTFT_MS = 50.0
_MIN_STREAMS = 5
"""Fewer in either arm cannot reach the 1 %."""
_MIN_GAPS = 4


class Spread(NamedTuple):
    """Medians over streams, in milliseconds; None without any."""

    ttft_ms: float | None
    itl_ms: float | None


def ttft_ms(streams: Sequence[StreamRecord]) -> list[float]:
    return [(stream.frame_ns[0] - stream.started_ns) / MS for stream in streams if stream.frame_ns]


def itl_ms(streams: Sequence[StreamRecord], since_ns: int = 0) -> list[float]:
    """The median gap of each stream that has enough gaps after `since_ns`."""
    out = []
    for stream in streams:
        gaps = [(two - one) / MS for one, two in pairwise(stream.frame_ns) if one >= since_ns]
        if len(gaps) >= _MIN_GAPS:
            out.append(median(gaps))
    return out


def spread(streams: Sequence[StreamRecord]) -> Spread:
    first, gaps = ttft_ms(streams), itl_ms(streams)
    return Spread(median(first) if first else None, median(gaps) if gaps else None)


def slowdowns(result: StormResult) -> list[str]:
    """One sentence for each of the two that is slower."""
    calm = result.of(Role.CALM)
    if not calm:
        return []
    left_ns = max((stream.left_ns or 0 for stream in result.streams), default=0)
    pairs = (
        ("survivors' gaps between tokens", itl_ms(calm), itl_ms(result.of(Role.SURVIVOR), left_ns), LEAST_ITL_MS),
        ("later streams' first tokens", ttft_ms(calm), ttft_ms(result.of(Role.LATER)), LEAST_TTFT_MS),
    )
    return [line for name, before, after, least in pairs if (line := _slower(name, before, after, least))]


def _slower(name: str, before: Sequence[float], after: Sequence[float], least_ms: float) -> str | None:
    if min(len(before), len(after)) < _MIN_STREAMS:
        return None
    one, two = median(before), median(after)
    if two < FACTOR * one or two - one < least_ms:
        return None
    p_value, _ = permutation_p(before, after)
    if p_value >= ALPHA:
        return None
    return f"{name}: median {two:.1f} ms after the victims had left, {one:.1f} ms without a storm (p = {p_value:.2g})"
