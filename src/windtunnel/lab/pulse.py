"""How late the lab itself is: a timer of its own, so that a busy machine is not mistaken for a slow server."""

import asyncio
from collections.abc import Callable, Iterable

from windtunnel.core.units import MS
from windtunnel.lab.record import Lag

BEAT_NS = 10 * MS
LEAST_LAG_NS = 50 * MS
"""Less is what a busy event loop takes: whatever has come meanwhile is read in time."""
LAG_LIMIT = 50_000
STARVED_SHARE = 0.75
"""A wait of which the lab slept through so much proves nothing about the server."""


class Pulse:
    """Writes the lags of one storm down as they come."""

    def __init__(self, now_ns: Callable[[], int], lags: list[Lag]) -> None:
        self.lags = lags
        self._now_ns = now_ns

    async def run(self) -> None:
        """Until it is cancelled."""
        while len(self.lags) < LAG_LIMIT:
            due_ns = self._now_ns() + BEAT_NS
            await asyncio.sleep(BEAT_NS / 1e9)
            late_ns = self._now_ns() - due_ns
            if late_ns >= LEAST_LAG_NS:
                self.lags.append(Lag(due_ns, late_ns))


def lag_ns(lags: Iterable[Lag], since_ns: int, until_ns: int) -> int:
    """How much of this time the lab did not see."""
    return sum(max(0, min(until_ns, lag.at_ns + lag.late_ns) - max(since_ns, lag.at_ns)) for lag in lags)


def starved(lags: Iterable[Lag], since_ns: int, until_ns: int) -> bool:
    """Whether the lab slept through too much of this time to judge a deadline that passed in it."""
    return lag_ns(lags, since_ns, until_ns) > STARVED_SHARE * (until_ns - since_ns)
