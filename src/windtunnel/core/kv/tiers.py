"""Tiers behind the block pool: what falls out of GPU memory stays findable for a while, in host memory and then on disk.

Rules this file lives by:

* A cached block is in the pool or in one tier, never in two: the last copy that leaves the pool enters the first tier; what a
  tier has no room for enters the one behind it; a hit takes it out of its tier, and so does computing it again.
* A tier holds hashes only, at most `capacity`; the one that came first goes first. A hit leaves the tier and comes back as the
  youngest, so this order is the order of last use.
* Its events have the tier's medium and name hashes alone, with a block size of 0: the placeholders of vLLM 0.33's
  offloading connector without `self_describing_kv_events`.
"""

from collections.abc import Container, Iterable, Sequence

from windtunnel.core.outputs import BlockRemoved, BlockStored, KvEvent

HOST = "CPU"
DISK = "STORAGE"
"""The names of the media in events: `MEDIUM_CPU` and `MEDIUM_STORAGE` (vLLM 0.33, `distributed/kv_events.py`)."""

_NO_SIZE = 0


class Tier:
    """Owns the blocks of one medium. `events` is the pool's list, so that all media share one order; None: no events."""

    def __init__(self, medium: str, capacity: int, events: list[KvEvent] | None, behind: "Tier | None" = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: must be at least 1 block")
        self.medium = medium
        self.capacity = capacity
        self.behind = behind
        self._events = events
        self._hashes: dict[bytes, None] = {}

    def __contains__(self, digest: bytes) -> bool:
        """Here or behind."""
        return digest in self._hashes or (self.behind is not None and digest in self.behind)

    @property
    def hashes(self) -> frozenset[bytes]:
        """What is here, without the tier behind."""
        return frozenset(self._hashes)

    def keep(self, digest: bytes) -> None:
        """A block has left the pool, or the tier in front."""
        self._hashes[digest] = None
        if self._events is not None:
            self._events.append(BlockStored((digest,), None, (), _NO_SIZE, None, (), self.medium))
        if len(self._hashes) > self.capacity:
            oldest = next(iter(self._hashes))
            self._forget((oldest,))
            if self.behind is not None:
                self.behind.keep(oldest)

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget those of these that are here or behind: they are taken into the pool, or computed again."""
        self._forget(digests)
        if self.behind is not None:
            self.behind.drop(digests)

    def _forget(self, digests: Iterable[bytes]) -> None:
        gone = tuple(digest for digest in digests if digest in self._hashes)
        for digest in gone:
            del self._hashes[digest]
        if gone and self._events is not None:
            self._events.append(BlockRemoved(gone, self.medium))

    def count_behind(self, digests: Iterable[bytes]) -> int:
        """How many of these are not here but behind."""
        return 0 if self.behind is None else sum(digest in self.behind for digest in digests)

    def clear(self) -> None:
        """Without an event: `AllBlocksCleared` names no medium."""
        self._hashes.clear()
        if self.behind is not None:
            self.behind.clear()

    def check_integrity(self, in_front: Container[bytes]) -> None:
        """Raise AssertionError unless each tier keeps to its size and shares nothing with the pool or another tier."""
        assert len(self._hashes) <= self.capacity, f"the {self.medium} tier is over its size"
        assert not any(digest in in_front for digest in self._hashes), "a block is in two tiers"
        if self.behind is not None:
            assert not any(digest in in_front for digest in self.behind.hashes), "a block is in two tiers"
            self.behind.check_integrity(self._hashes)


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places as ranges (first, stop)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs
