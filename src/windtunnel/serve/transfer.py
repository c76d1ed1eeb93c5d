"""The simulated transport of KV between servers, as both flavours are told of it."""

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from windtunnel.core.transfer.backends import FATES, OK, Fate, SimBackend, Write


class TransferSettings(Protocol):
    """What `--transfer-…` says. Times as the real transport has them."""

    @property
    def bandwidth_gb_s(self) -> float: ...

    @property
    def transfer_latency_ns(self) -> int: ...

    @property
    def dead_peer_ns(self) -> int: ...

    @property
    def fates(self) -> tuple[tuple[str, float], ...]:
        """(fate, share of the posted moves); the rest is `ok`."""
        ...


def parse_fates(value: Any) -> tuple[tuple[str, float], ...]:
    """`stall=0.01,fail=0.02`: shares of the posted moves. Raises ValueError."""
    fates: list[tuple[str, float]] = []
    for item in value if isinstance(value, list | tuple) else str(value).split(","):
        kind, _, share = str(item).partition("=")
        try:
            fates.append((kind, float(share)))
        except ValueError:
            fates.append((kind, -1.0))
        if kind not in FATES or not 0 <= fates[-1][1] <= 1:
            raise ValueError(f"{item!r} is not KIND=SHARE, with one of {', '.join(FATES)} and a share from 0 to 1")
    if sum(share for _, share in fates) > 1:
        raise ValueError(f"{value!r}: the shares add up to more than 1")
    return tuple(fates)


def sim_backend(settings: TransferSettings, time_scale: float, chance: Random) -> SimBackend:
    return SimBackend(
        bandwidth_gb_s=settings.bandwidth_gb_s * time_scale,
        latency_ns=round(settings.transfer_latency_ns / time_scale),
        dead_peer_ns=round(settings.dead_peer_ns / time_scale),
        fate=_draw(settings.fates, chance),
    )


def _draw(fates: tuple[tuple[str, float], ...], chance: Random) -> Callable[[Write], Fate]:
    def fate(_write: Write) -> Fate:
        drawn = chance.random() if fates else 1.0
        for kind, share in fates:
            if drawn < share:
                return Fate(kind)
            drawn -= share
        return OK

    return fate
