"""A host tier behind the block pool: what falls out of GPU memory stays findable for a while.

Rules this file lives by:

* A cached block is in the pool or in the tier, never in both: the last copy that leaves the pool enters the tier; a hit takes
  it out of the tier, and so does computing it again.
* The tier holds hashes only, at most `capacity`; the one that came first goes first. A hit leaves the tier and comes back as
  the youngest, so this order is the order of last use.
* Its events have the medium `CPU` and name hashes alone, as vLLM's offloading connector has them.
"""

from collections.abc import Container, Iterable, Sequence

from windtunnel.core.outputs import BlockRemoved, BlockStored, KvEvent

MEDIUM = "CPU"


class HostTier:
    """Owns the blocks in host memory. `events` is the pool's list, so that both media share one order; None: no events."""

    def __init__(self, capacity: int, block_size: int, events: list[KvEvent] | None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: must be at least 1 block")
        self.capacity = capacity
        self._block_size = block_size
        self._events = events
        self._hashes: dict[bytes, None] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> frozenset[bytes]:
        return frozenset(self._hashes)

    def keep(self, digest: bytes) -> None:
        """A block has left the pool."""
        self._hashes[digest] = None
        if self._events is not None:
            self._events.append(BlockStored((digest,), None, (), self._block_size, None, (), MEDIUM))
        if len(self._hashes) > self.capacity:
            self.drop([next(iter(self._hashes))])

    def drop(self, digests: Iterable[bytes]) -> None:
        """Forget those of these that are here: they are taken into the pool, computed again, or the oldest."""
        gone = tuple(digest for digest in digests if digest in self._hashes)
        for digest in gone:
            del self._hashes[digest]
        if gone and self._events is not None:
            self._events.append(BlockRemoved(gone, MEDIUM))

    def clear(self) -> None:
        """Without an event: `AllBlocksCleared` names no medium."""
        self._hashes.clear()

    def check_integrity(self, in_pool: Container[bytes]) -> None:
        """Raise AssertionError unless the tier keeps to its size and shares nothing with the pool."""
        assert len(self._hashes) <= self.capacity, "the host tier is over its size"
        assert not any(digest in in_pool for digest in self._hashes), "a block is in two tiers"


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places as ranges (first, stop)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs
