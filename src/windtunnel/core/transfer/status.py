"""The room table of a KV manager: room → status, as SGLang kept it over its releases (SGLang reference §1).

* The numbers matter twice and in opposite directions: across ranks statuses reduce with MIN (one failed rank fails the
  request), within one rank writes merge with MAX. `FAILED` is the smallest, so a plain max never records it.
* There is no lock. An update is a read, a comparison and a write: `begin_update` is the first two, `commit` the last.
  Whatever another thread does between them is lost, as in the real table; that is how the race of §1.6 is forced.
* The rule is data: five of them, named by era, in `RULES`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import NamedTuple


class KVPoll(IntEnum):
    """The status of a room, with SGLang's numbers."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


Rule = Callable[[KVPoll | None, KVPoll], KVPoll | None]
"""(value read or None for an unknown room, value to record) → what to store, or None to store nothing."""

_BIRTHS = frozenset({KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT})


def _max(read: KVPoll | None, new: KVPoll) -> KVPoll | None:
    return new if read is None else max(read, new)


def _failset(read: KVPoll | None, new: KVPoll) -> KVPoll | None:
    return new if new is KVPoll.FAILED else _max(read, new)


def _nores(read: KVPoll | None, new: KVPoll) -> KVPoll | None:
    return None if read is None and new is KVPoll.FAILED else _failset(read, new)


def _nixl_sticky(read: KVPoll | None, new: KVPoll) -> KVPoll | None:
    return None if read is KVPoll.FAILED else _nores(read, new)


def _terminal_failed(read: KVPoll | None, new: KVPoll) -> KVPoll | None:
    return None if read is None and new not in _BIRTHS else _nixl_sticky(read, new)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "max": _max,
        "failset": _failset,
        "nores": _nores,
        "nixl-sticky": _nixl_sticky,
        "terminal-failed": _terminal_failed,
    }
)
"""The rules (a) to (e) of SGLang reference §1.3, in that order."""


class MissingRoom(Enum):
    """What `check_status` says of a room that is not in the table (SGLang reference §1.4)."""

    RAISE = "raise"
    """A plain dict lookup: KeyError (Mooncake before the common manager)."""
    WAITING = "waiting"
    """WaitingForInput (NIXL from 0.5.12)."""
    FAILED = "failed"
    """Failed (the common sender poll, 0.5.23)."""


_MISSING = {MissingRoom.WAITING: KVPoll.WAITING_FOR_INPUT, MissingRoom.FAILED: KVPoll.FAILED}


class PendingWrite(NamedTuple):
    """An update between its read and its write."""

    room: int
    read: KVPoll | None
    store: KVPoll | None
    """None: the rule drops the update."""

    @property
    def creates(self) -> bool:
        """The room was unknown when it was read and will exist after the write."""
        return self.read is None and self.store is not None


class StatusTable:
    """Room → status on one rank. Shared by all threads of that rank, without a lock."""

    def __init__(self, rule: str = "terminal-failed", missing: MissingRoom = MissingRoom.FAILED) -> None:
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}: must be one of {', '.join(RULES)}")
        self.rule = rule
        self.missing = missing
        self._rooms: dict[int, KVPoll] = {}

    def begin_update(self, room: int, status: KVPoll) -> PendingWrite:
        """Read and compare. The table is unchanged."""
        read = self._rooms.get(room)
        return PendingWrite(room, read, RULES[self.rule](read, status))

    def commit(self, pending: PendingWrite) -> None:
        """Write what was decided at the read, whatever the table says by this time."""
        if pending.store is not None:
            self._rooms[pending.room] = pending.store

    def update(self, room: int, status: KVPoll) -> PendingWrite:
        """`begin_update` and `commit` with nothing between them."""
        pending = self.begin_update(room, status)
        self.commit(pending)
        return pending

    def check_status(self, room: int) -> KVPoll:
        """The status as the scheduler polls it. Raises KeyError for a missing room with `MissingRoom.RAISE`."""
        status = self._rooms.get(room)
        return self._missing(room) if status is None else status

    def _missing(self, room: int) -> KVPoll:
        if self.missing is MissingRoom.RAISE:
            raise KeyError(room)
        return _MISSING[self.missing]

    def get(self, room: int) -> KVPoll | None:
        """The stored value; None for an unknown room."""
        return self._rooms.get(room)

    def clear(self, room: int) -> None:
        """Forget the room; an unknown one is a no-op."""
        self._rooms.pop(room, None)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rooms)

    def snapshot(self) -> tuple[tuple[int, KVPoll], ...]:
        """The whole table, sorted by room: equal tables give equal values."""
        return tuple(sorted(self._rooms.items()))

    def restore(self, snapshot: Sequence[tuple[int, KVPoll]]) -> None:
        """Replace the table's content (exploration goes back to an earlier state)."""
        self._rooms = dict(snapshot)


def reduce_polls(ranks: Sequence[Sequence[KVPoll]]) -> list[KVPoll]:
    """One status per request: the MIN over ranks. Each rank gives its statuses in the same order of requests."""
    return [min(column) for column in zip(*ranks, strict=True)]


def combine_pipeline(own: Sequence[KVPoll | None], passed_down: Sequence[KVPoll]) -> list[KVPoll]:
    """A pipeline stage's view: the minimum with rank 0's polls; a room the stage does not know is Bootstrapping."""
    pairs = zip(own, passed_down, strict=True)
    return [min(KVPoll.BOOTSTRAPPING if mine is None else mine, theirs) for mine, theirs in pairs]
