"""Blocks that an engine keeps for a reader after their request has finished (vLLM reference §7.2)."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from windtunnel.core.kv.blocks import BlockPool

REMEMBERED = 1024
"""Holds that are over and whose blocks are still known: for readers that come too late."""


class Hold:
    """One finished request's blocks. Owned by its book."""

    __slots__ = ("blocks", "deadline_ns", "moving", "prompt", "renewable", "reported", "request_id", "tokens")

    def __init__(self, request_id: str, blocks: list[int], tokens: int, deadline_ns: int, *, renewable: bool) -> None:
        self.request_id = request_id
        self.blocks = blocks
        self.tokens = tokens
        """Computed in them."""
        self.deadline_ns = deadline_ns
        self.renewable = renewable
        """Heartbeats extend it."""
        self.reported = 0
        """Consumers that have what they need."""
        self.prompt: Sequence[int] = ()
        """Its token ids: what real memory is filled by."""
        self.moving = 0
        """Writes out of these blocks under way: until they end nothing expires."""


class HoldBook:
    """All holds of one engine. Owned by its connector, which gives the blocks back."""

    def __init__(self, pool: BlockPool, *, ordered: bool = False) -> None:
        """`ordered`: expire only what stands before the first that has not run out."""
        self._pool = pool
        self._ordered = ordered
        self._holds: dict[str, Hold] = {}
        self._deadlines: list[tuple[int, str]] = []
        """Of each hold one entry that is not later than its deadline."""
        self._gone: dict[str, dict[int, int]] = {}
        """Of holds that are over: the generation of each block when it was given back."""

    def __len__(self) -> int:
        return len(self._holds)

    def get(self, request_id: str) -> Hold | None:
        return self._holds.get(request_id)

    def all(self) -> Iterable[Hold]:
        return self._holds.values()

    def add(self, hold: Hold) -> None:
        self._holds[hold.request_id] = hold
        heappush(self._deadlines, (hold.deadline_ns, hold.request_id))

    def extend(self, request_ids: Iterable[str], until_ns: int) -> None:
        """A heartbeat: never shortens, and says nothing about unknown ids."""
        for request_id in request_ids:
            hold = self._holds.get(request_id)
            if hold is not None and hold.renewable:
                hold.deadline_ns = max(hold.deadline_ns, until_ns)

    def consumed(self, request_id: str, consumers: int) -> Hold | None:
        """One consumer has reported. The hold, taken out, if it was the last one."""
        hold = self._holds[request_id]
        hold.reported += 1
        return self.take(request_id) if hold.reported >= consumers else None

    def take(self, request_id: str) -> Hold:
        """Take a hold out; its blocks are about to be given back."""
        hold = self._holds.pop(request_id)
        self._gone[request_id] = dict(zip(hold.blocks, self._pool.watch(hold.blocks), strict=True))
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return hold

    def next_at(self) -> int | None:
        """The first deadline; of an ordered book, that of the oldest."""
        if self._ordered:
            oldest = next(iter(self._holds.values()), None)
            return None if oldest is None or oldest.moving else oldest.deadline_ns
        while self._deadlines:
            at_ns, request_id = self._deadlines[0]
            hold = self._holds.get(request_id)
            if hold is not None and at_ns == hold.deadline_ns and not hold.moving:
                return at_ns
            heappop(self._deadlines)
            if hold is not None and not hold.moving:
                heappush(self._deadlines, (hold.deadline_ns, request_id))
        return None

    def settled(self, hold: Hold) -> None:
        """A write out of it has ended."""
        hold.moving -= 1
        if not hold.moving and hold.request_id in self._holds:
            heappush(self._deadlines, (hold.deadline_ns, hold.request_id))

    def expire(self, now_ns: int) -> list[Hold]:
        """Take out every hold whose time is over: all entries are looked at, not only the oldest (vLLM #58222)."""
        if self._ordered:
            return [self.take(request_id) for request_id in self._first_expired(now_ns)]
        over: list[Hold] = []
        while (at_ns := self.next_at()) is not None and at_ns <= now_ns:
            over.append(self.take(heappop(self._deadlines)[1]))
        return over

    def _first_expired(self, now_ns: int) -> list[str]:
        ids: list[str] = []
        for hold in self._holds.values():
            if hold.deadline_ns > now_ns or hold.moving:
                break
            ids.append(hold.request_id)
        return ids

    def overwritten(self, request_id: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Places in `blocks` that somebody else has been given since this request gave them back."""
        known = self._gone.get(request_id)
        if known is None or request_id in self._holds:
            return ()
        generations = self._pool.generations
        return tuple(
            at for at, block in enumerate(blocks) if known.get(block, generations.get(block)) != generations.get(block)
        )
