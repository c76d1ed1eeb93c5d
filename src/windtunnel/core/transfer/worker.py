"""A transfer worker: the thread behind one transfer queue of a prefill rank, as atomic actions.

In timed mode the actions run one after the other, as far as they can. `promote_gap_ns` puts time between the check of a room
and the update to Transferring: an abort in it is overwritten by a rule that lets Transferring win over Failed. `write_gap_ns`
puts time inside the update, between its read and its write: an abort in it is overwritten under every rule. Whoever explores
interleavings holds the worker and calls `step` alone.

One worker waits for one chunk at a time, so a handle that never settles blocks everything behind it in the queue (SGLang
reference §1.6).
"""

from collections import deque
from enum import Enum
from typing import NamedTuple, Protocol

from windtunnel.core.transfer.backends import HandleState, TransferBackend, Write
from windtunnel.core.transfer.status import KVPoll, PendingWrite, StatusTable


class Chunk(NamedTuple):
    """Work for a worker: one chunk of one room."""

    room: int
    number: int
    is_last: bool
    enqueued_ns: int


class Action(Enum):
    """What a worker does next; each is atomic towards the other threads of its rank."""

    POP = "pop"
    """Take a chunk; skip it if its room is cleared, failed or without destinations."""
    READ = "read"
    """Read the status and decide what Transferring makes of it."""
    WRITE = "write"
    """Store what was decided."""
    POST = "post"
    WAIT = "wait"
    """Look at the handles."""
    SETTLE = "settle"
    """After an error: wait for the other handles, within limits."""
    CONCLUDE = "conclude"


class Rooms(Protocol):
    """What a worker needs of its rank."""

    table: StatusTable
    backend: TransferBackend

    def writes_of(self, chunk: Chunk) -> list[Write]:
        """One write for each destination of the room; empty for none."""
        ...

    def begin_chunk(self, room: int) -> None: ...

    def end_chunk(self, room: int, *, settled: bool, now_ns: int) -> None: ...

    def chunk_sent(self, chunk: Chunk, now_ns: int) -> None: ...

    def chunk_failed(self, chunk: Chunk, reason: str, *, settled: bool, now_ns: int) -> None: ...


class TransferWorker:
    """Owned by its rank."""

    def __init__(self, rooms: Rooms, promote_gap_ns: int, write_gap_ns: int, settle_timeout_ns: int | None) -> None:
        """`settle_timeout_ns` None: an error is reported without waiting for the other handles."""
        self.queue: deque[Chunk] = deque()
        self.action = Action.POP
        self.chunk: Chunk | None = None
        self.handles: list[int] = []
        self.held = False
        """Timed mode leaves it alone."""
        self.hold_before: frozenset[Action] = frozenset()
        """Timed mode stops before these, as a breakpoint would."""
        self._rooms = rooms
        self._promote_gap_ns = promote_gap_ns
        self._write_gap_ns = write_gap_ns
        self._settle_timeout_ns = settle_timeout_ns
        self._pending: PendingWrite | None = None
        self._ready_ns = 0
        self._free_ns = 0
        """When the chunk before ended."""
        self._reason = ""
        self._settle_until_ns = 0

    # Stepping

    @property
    def runnable(self) -> bool:
        """The next action would do something."""
        if self.action is Action.POP:
            return bool(self.queue)
        if self.action is Action.WAIT:
            return any(state is HandleState.ERROR for state in self._states()) or self._all_done()
        return True

    def step(self, now_ns: int) -> Action:
        """Run the next atomic action, which is returned."""
        action = self.action
        _STEPS[action](self, now_ns)
        return action

    def next_at(self, now_ns: int) -> int | None:
        """When timed mode runs the next action; None while only the transport or a caller can change anything.

        A thread does not wait for its scheduler's driver: what was due before `now_ns` (a driver is late) keeps its own time.
        """
        if self.held or self.action in self.hold_before:
            return None
        if self.action is Action.SETTLE and not self._settled():
            return max(now_ns, self._settle_until_ns)
        if not self.runnable:
            return None
        due_ns = self._pop_ns if self.action is Action.POP else self._ready_ns
        return due_ns if self.action in _ON_TIME else max(now_ns, due_ns)

    def run(self, now_ns: int) -> None:
        """Timed mode: all actions due at `now_ns`."""
        while (at := self.next_at(now_ns)) is not None and at <= now_ns:
            self.step(now_ns)

    # The actions

    def _pop(self, now_ns: int) -> None:
        chunk = self.queue.popleft()
        if self._rooms.table.get(chunk.room) in (None, KVPoll.FAILED) or not self._rooms.writes_of(chunk):
            return
        self.chunk = chunk
        self._rooms.begin_chunk(chunk.room)
        self._ready_ns = max(chunk.enqueued_ns, self._free_ns) + self._promote_gap_ns
        self.action = Action.READ

    def _read(self, now_ns: int) -> None:
        self._pending = self._rooms.table.begin_update(self._current.room, KVPoll.TRANSFERRING)
        self._ready_ns += self._write_gap_ns
        self.action = Action.WRITE

    def _write(self, now_ns: int) -> None:
        assert self._pending is not None, "a write without a read"
        self._rooms.table.commit(self._pending)
        self._pending = None
        self.action = Action.POST

    def _post(self, now_ns: int) -> None:
        writes = self._rooms.writes_of(self._current)
        self.handles = [self._rooms.backend.post(write, now_ns) for write in writes]
        if not writes:
            self._reason = "the destinations of the room are gone"
            self.action = Action.CONCLUDE
        else:
            self.action = Action.WAIT

    def _wait(self, now_ns: int) -> None:
        if any(state is HandleState.ERROR for state in self._states()):
            self._reason = "the transport reports an error"
            self._settle_until_ns = now_ns + (self._settle_timeout_ns or 0)
            self.action = Action.SETTLE if self._settle_timeout_ns is not None else Action.CONCLUDE
        elif self._all_done():
            self.action = Action.CONCLUDE

    def _settle(self, now_ns: int) -> None:
        if self._settled() or now_ns >= self._settle_until_ns:
            self.action = Action.CONCLUDE

    def _conclude(self, now_ns: int) -> None:
        chunk, settled = self._current, self._settled()
        for handle in self.handles:
            self._rooms.backend.release(handle)
        if self._reason:
            self._rooms.chunk_failed(chunk, self._reason, settled=settled, now_ns=now_ns)
        else:
            self._rooms.chunk_sent(chunk, now_ns)
        self.handles, self.chunk, self._reason, self.action = [], None, "", Action.POP
        self._free_ns = now_ns
        self._rooms.end_chunk(chunk.room, settled=settled, now_ns=now_ns)

    # Looking

    @property
    def _pop_ns(self) -> int:
        """When the thread takes the next chunk: as it comes, or as the chunk before ends."""
        return max(self.queue[0].enqueued_ns, self._free_ns)

    @property
    def _current(self) -> Chunk:
        assert self.chunk is not None, "the worker has no chunk"
        return self.chunk

    def _states(self) -> list[HandleState]:
        return [self._rooms.backend.state(handle) for handle in self.handles]

    def _all_done(self) -> bool:
        return all(state is HandleState.DONE for state in self._states())

    def _settled(self) -> bool:
        return all(state is not HandleState.IN_PROGRESS for state in self._states())


_ON_TIME = frozenset({Action.POP, Action.READ, Action.WRITE})
_STEPS = {
    Action.POP: TransferWorker._pop,
    Action.READ: TransferWorker._read,
    Action.WRITE: TransferWorker._write,
    Action.POST: TransferWorker._post,
    Action.WAIT: TransferWorker._wait,
    Action.SETTLE: TransferWorker._settle,
    Action.CONCLUDE: TransferWorker._conclude,
}
