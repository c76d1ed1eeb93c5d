"""What one decode rank keeps: the room table, completions, metadata buffers, acknowledgements (reference §1.5, §4.1)."""

from collections import Counter

from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.pages import PagePool
from windtunnel.core.transfer.frames import AbortAck, Aux, Frame, KvChunk, KvStatus, LateWrite, Outgoing
from windtunnel.core.transfer.status import KVPoll, MissingRoom, StatusTable

NO_REASON = "Failed to get kvcache from prefill instance, it might be dead"


class Arrivals:
    """What has come in for one room: chunk numbers by prefill rank, how many each rank sends, the aux data."""

    __slots__ = ("aux", "chunks", "expected", "required_ranks", "succeeded")

    def __init__(self, required_ranks: int) -> None:
        self.required_ranks = required_ranks
        self.chunks: dict[int, set[int]] = {}
        self.expected: dict[int, int] = {}
        """Known from the chunk that is the last."""
        self.aux = False
        self.succeeded: set[int] = set()
        """Prefill ranks that reported success."""

    def note(self, chunk: KvChunk) -> None:
        self.chunks.setdefault(chunk.rank, set()).add(chunk.chunk)
        if chunk.is_last:
            self.expected[chunk.rank] = chunk.chunk + 1
            self.aux = True

    @property
    def complete(self) -> bool:
        """Aux, and all chunks of all ranks."""
        whole = [rank for rank, count in self.expected.items() if len(self.chunks.get(rank, ())) == count]
        return self.aux and len(whole) >= self.required_ranks


class DecodeRank:
    """The KV manager of one attention-TP rank."""

    def __init__(self, config: DisaggConfig, rank: int, pool: PagePool) -> None:
        self.config = config
        self.rank = rank
        self.table = StatusTable(config.profile.status_rule, MissingRoom(config.profile.missing_room))
        self.reasons: dict[int, str] = {}
        self.counters: Counter[str] = Counter()
        self.arrivals: dict[int, Arrivals] = {}
        self.buffers: dict[int, Aux] = {}
        """Metadata buffers by slot: what was written there last."""
        self.acks: dict[tuple[int, int], set[int]] = {}
        """(room, generation) → prefill ranks that have acknowledged, for aborts that somebody waits on."""
        self.outgoing: list[Outgoing] = []
        self.late_writes: list[LateWrite] = []
        self._pool = pool
        self._notes: list[KvChunk] = []

    @property
    def endpoint(self) -> str:
        return self.config.endpoints[self.rank]

    # Frames

    def receive(self, frame: Frame, now_ns: int) -> None:
        """A landed write, or what the listener thread reads."""
        if isinstance(frame, KvChunk):
            self._landed(frame, now_ns)
        elif isinstance(frame, KvStatus):
            self._status(frame)
        elif isinstance(frame, AbortAck):
            waiting = self.acks.get((frame.room, frame.generation))
            if waiting is not None:
                waiting.add(frame.rank)
        else:
            raise ValueError(f"a decode takes KvChunk, KvStatus and AbortAck frames, not {type(frame).__name__}")

    def _landed(self, chunk: KvChunk, now_ns: int) -> None:
        """The transport asks nobody; whose memory it was is known only here."""
        strangers = self._pool.strangers(chunk.pages, chunk.stamp)
        if strangers:
            self.late_writes.append(LateWrite(now_ns, chunk.room, chunk.rank, self.rank, tuple(strangers)))
        if chunk.aux is not None:
            self.buffers[chunk.aux_index] = chunk.aux
        if not self.config.profile.success_notice and chunk.room in self.arrivals:
            self._notes.append(chunk)

    def _status(self, frame: KvStatus) -> None:
        arrivals = self.arrivals.get(frame.room)
        if arrivals is None or frame.room not in self.table:
            return
        if frame.status is KVPoll.FAILED:
            self.fail(frame.room, frame.reason or NO_REASON)
        elif frame.status is KVPoll.SUCCESS:
            arrivals.succeeded.add(frame.rank)
            if len(arrivals.succeeded) == arrivals.required_ranks:
                self.table.update(frame.room, KVPoll.SUCCESS)

    def drain(self) -> None:
        """Read the notifications that have come with writes: up to 0.5.22 only a receiver's poll does so."""
        notes, self._notes = self._notes, []
        for chunk in notes:
            arrivals = self.arrivals.get(chunk.room)
            if arrivals is None:
                continue
            arrivals.note(chunk)
            if arrivals.complete:
                self.table.update(chunk.room, KVPoll.SUCCESS)

    # Rooms

    def open(self, room: int) -> None:
        self.table.update(room, KVPoll.BOOTSTRAPPING)

    def fail(self, room: int, reason: str) -> None:
        self.reasons.setdefault(room, reason)
        self.table.update(room, KVPoll.FAILED)

    def clear(self, room: int) -> None:
        self.table.clear(room)
        self.reasons.pop(room, None)
        self.arrivals.pop(room, None)

    def reason(self, room: int) -> str:
        return self.reasons.get(room, "Failed due to an unknown reason from another rank")

    def send(self, to: str, frame: Frame) -> None:
        self.outgoing.append(Outgoing(self.rank, to, frame))
