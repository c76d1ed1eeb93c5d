"""What moves pages: one seam, `TransferBackend`, under the transfer workers of a prefill rank.

`SimBackend` models time (latency + bytes / bandwidth for each write) and misfortune: a handle can stall for ever, fail, or
lose its peer; a lost peer is reported by the transport only after `dead_peer_ns`. A write lands in the decode's memory when
its handle is done, whether or not anybody still looks at the handle.

The *fake* peer needs no backend: `FakeSender` and `FakeReceiver` conclude by themselves, with SGLang's quirks (reference
§1.5, §4.3).
"""

from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from windtunnel.core.transfer.frames import Aux, KvChunk
from windtunnel.core.transfer.status import KVPoll
from windtunnel.core.units import US, S


class Write(NamedTuple):
    """One posted write: a chunk of one room to one decode rank."""

    peer: str
    chunk: KvChunk
    size_bytes: int


class HandleState(Enum):
    """What the transport says of a posted write."""

    IN_PROGRESS = "in progress"
    DONE = "done"
    ERROR = "error"


class TransferBackend(Protocol):
    """Owned by one prefill rank. Handles are small integers."""

    def post(self, write: Write, now_ns: int) -> int: ...

    def state(self, handle: int) -> HandleState:
        """As of the latest `run`."""
        ...

    def release(self, handle: int) -> None:
        """Nobody will ask for this handle again. A write in progress goes on."""
        ...

    def next_event_at(self) -> int | None: ...

    def run(self, now_ns: int) -> list[Write]:
        """Let time pass. Returns the writes that have landed in the peer's memory, in order."""
        ...

    def lose_peer(self, peer: str, now_ns: int) -> None:
        """The process behind this address is gone."""
        ...

    def abandon(self, room: int, now_ns: int) -> None:
        """The decode's side of this room is gone, though its process may live."""
        ...


class Fate(NamedTuple):
    """What becomes of a handle. `kind`: `ok`, `stall` (never settles), `fail` (error after `after_ns`), `lost` (no peer)."""

    kind: str = "ok"
    after_ns: int = 0


FATES = ("ok", "stall", "fail", "lost")
OK = Fate()


def always_ok(_write: Write) -> Fate:
    return OK


class _Handle:
    __slots__ = ("due_ns", "landing", "released", "state", "write")

    def __init__(self, write: Write, due_ns: int | None, *, landing: bool) -> None:
        self.write = write
        self.due_ns = due_ns
        self.landing = landing
        self.state = HandleState.IN_PROGRESS
        self.released = False


class SimBackend:
    """Virtual transfers. One owner: a prefill rank."""

    def __init__(
        self,
        *,
        bandwidth_gb_s: float = 10.0,
        latency_ns: int = 100 * US,
        dead_peer_ns: int = 30 * S,
        fate: Callable[[Write], Fate] = always_ok,
    ) -> None:
        """`bandwidth_gb_s` in 10^9 bytes a second. `fate` decides, at the post, what becomes of a handle."""
        if bandwidth_gb_s <= 0:
            raise ValueError(f"bandwidth_gb_s is {bandwidth_gb_s}: must be above 0")
        if latency_ns < 0 or dead_peer_ns < 0:
            raise ValueError(f"latency_ns is {latency_ns} and dead_peer_ns {dead_peer_ns}: both must be at least 0")
        self._bandwidth_gb_s = bandwidth_gb_s
        self._latency_ns = latency_ns
        self._dead_peer_ns = dead_peer_ns
        self.fate = fate
        self._handles: dict[int, _Handle] = {}
        self._due: list[tuple[int, int]] = []
        self._count = 0
        self._lost_peers: set[str] = set()
        self._lost_rooms: set[int] = set()

    @property
    def open_handles(self) -> int:
        """Handles that somebody still waits for."""
        return sum(not handle.released for handle in self._handles.values())

    def post(self, write: Write, now_ns: int) -> int:
        self._count += 1
        fate = self.fate(write)
        if fate.kind not in FATES:
            raise ValueError(f"fate is {fate.kind!r}: must be one of {', '.join(FATES)}")
        if fate.kind != "stall" and (write.peer in self._lost_peers or write.chunk.room in self._lost_rooms):
            fate = Fate("lost")
        self._handles[self._count] = _Handle(write, None, landing=fate.kind == "ok")
        due_ns = self._due_ns(fate, write.size_bytes, now_ns)
        if due_ns is not None:
            self._schedule(self._count, due_ns)
        return self._count

    def _due_ns(self, fate: Fate, size_bytes: int, now_ns: int) -> int | None:
        if fate.kind == "stall":
            return None
        if fate.kind == "lost":
            return now_ns + self._dead_peer_ns
        if fate.kind == "fail":
            return now_ns + fate.after_ns
        return now_ns + self._latency_ns + round(size_bytes / self._bandwidth_gb_s)

    def _schedule(self, number: int, due_ns: int) -> None:
        self._handles[number].due_ns = due_ns
        heappush(self._due, (due_ns, number))

    def state(self, handle: int) -> HandleState:
        return self._handles[handle].state

    def release(self, handle: int) -> None:
        entry = self._handles[handle]
        entry.released = True
        if entry.state is not HandleState.IN_PROGRESS:
            del self._handles[handle]

    def next_event_at(self) -> int | None:
        while self._due and not self._is_current(*self._due[0]):
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def _is_current(self, due_ns: int, number: int) -> bool:
        handle = self._handles.get(number)
        return handle is not None and handle.due_ns == due_ns and handle.state is HandleState.IN_PROGRESS

    def run(self, now_ns: int) -> list[Write]:
        landed: list[Write] = []
        while (at := self.next_event_at()) is not None and at <= now_ns:
            number = heappop(self._due)[1]
            handle = self._handles[number]
            handle.state = HandleState.DONE if handle.landing else HandleState.ERROR
            if handle.landing:
                landed.append(handle.write)
            if handle.released:
                del self._handles[number]
        return landed

    def lose_peer(self, peer: str, now_ns: int) -> None:
        self._lost_peers.add(peer)
        self._lose(lambda write: write.peer == peer, now_ns)

    def find_peer(self, peer: str) -> None:
        """A process has taken up this address again: later writes reach it."""
        self._lost_peers.discard(peer)

    def abandon(self, room: int, now_ns: int) -> None:
        self._lost_rooms.add(room)
        self._lose(lambda write: write.chunk.room == room, now_ns)

    def _lose(self, concerned: Callable[[Write], bool], now_ns: int) -> None:
        """Writes in progress will not land; the transport says so when it has noticed. A stalled one stays stalled."""
        for number, handle in self._handles.items():
            if handle.landing and handle.state is HandleState.IN_PROGRESS and concerned(handle.write):
                handle.landing = False
                self._schedule(number, now_ns + self._dead_peer_ns)


class FakeSender:
    """The sender towards no peer: success at the first poll after the first `send`, however many chunks there are (P45)."""

    reason = "Fake KVSender Exception"
    prefix_tokens = 0

    def __init__(self, waiting_timeout_ns: int) -> None:
        self._waiting_timeout_ns = waiting_timeout_ns
        self._initialised = self._sent = self._failed = False
        self._since_ns: int | None = None

    def init(self) -> None:
        self._initialised = True

    def send(self, first: int, count: int, aux: Aux | None, now_ns: int) -> None:
        self._sent = True

    def abort(self) -> None:
        self._failed = True

    def clear(self) -> None:
        """There is no table to forget it in."""

    def disown(self) -> None:
        """As `clear`."""

    def poll(self, now_ns: int) -> KVPoll:
        """Without a `send` it fails after the waiting timeout, counted from the first poll after `init`."""
        if self._failed:
            return KVPoll.FAILED
        if self._sent:
            return KVPoll.SUCCESS
        if self._initialised:
            self._since_ns = now_ns if self._since_ns is None else self._since_ns
            self._failed = now_ns - self._since_ns >= self._waiting_timeout_ns
        return KVPoll.FAILED if self._failed else KVPoll.WAITING_FOR_INPUT

    def deadline_ns(self) -> int | None:
        if self._failed or self._sent or self._since_ns is None:
            return None
        return self._since_ns + self._waiting_timeout_ns


class FakeReceiver:
    """The receiver from no peer: Bootstrapping until `init`, WaitingForInput until the metadata is "sent", then Success."""

    reason = "Fake KVReceiver Exception"

    def __init__(self) -> None:
        self._status = KVPoll.BOOTSTRAPPING

    def init(self) -> None:
        self._status = KVPoll.WAITING_FOR_INPUT

    def send_metadata(self, pages: tuple[int, ...], stamp: int, slot: int, prefix_tokens: int, now_ns: int) -> None:
        self._status = KVPoll.SUCCESS

    def abort(self) -> None:
        self._status = KVPoll.FAILED

    def clear(self) -> None:
        """There is no table to forget it in."""

    def poll(self, now_ns: int) -> KVPoll:
        return self._status

    def deadline_ns(self) -> int | None:
        return None
