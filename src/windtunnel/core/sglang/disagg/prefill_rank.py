"""What one prefill rank keeps: the room table, destinations, transfer workers and the receive thread (reference §1.5, §4.1)."""

from collections import Counter
from collections.abc import Sequence

from windtunnel.core.sglang.disagg.config import DisaggConfig, port_of
from windtunnel.core.transfer.backends import TransferBackend, Write
from windtunnel.core.transfer.frames import Abort, AbortAck, Aux, Frame, KvChunk, KvStatus, Metadata, Outgoing
from windtunnel.core.transfer.status import KVPoll, MissingRoom, StatusTable
from windtunnel.core.transfer.worker import Chunk, TransferWorker

ABORTED = "Aborted by AbortReq."
ABORTED_BY_DECODE = "Aborted by decode-side abort notification."
_TOMBSTONES = 65536


class PrefillRank:
    """The KV manager of one attention-TP rank. Implements `worker.Rooms`."""

    def __init__(self, config: DisaggConfig, rank: int, page_size: int, backend: TransferBackend) -> None:
        self.config = config
        self.rank = rank
        self.backend = backend
        profile = config.profile
        self.table = StatusTable(profile.status_rule, MissingRoom(profile.missing_room))
        self.destinations: dict[int, dict[str, Metadata]] = {}
        self.reasons: dict[int, str] = {}
        """Failure records: the first reason of each room."""
        self.senders: Counter[int] = Counter()
        """Live senders by room: one, unless somebody uses a room twice."""
        self.counters: Counter[str] = Counter()
        self.receiving = True
        """False: the receive thread has died."""
        self.poisoned: set[int] = set()
        settle_ns = config.settle_timeout_ns if profile.conclude_checks else None
        gaps = config.promote_gap_ns, config.write_gap_ns
        self.workers = [TransferWorker(self, *gaps, settle_ns) for _ in range(config.transfer_queues)]
        self.outgoing: list[Outgoing] = []
        self.inline: dict[int, list[int]] = {}
        """Handles by room, where there are no workers."""
        self._page_bytes = page_size * config.kv_bytes_per_token
        self._chunks: dict[int, list[tuple[int, int]]] = {}
        """For each room the destination pages (first, count) of each chunk handed over."""
        self._aux: dict[int, Aux] = {}
        self._under_way: Counter[int] = Counter()
        self._acks: dict[int, list[tuple[str, int]]] = {}
        self._tombstones: dict[int, None] = {}

    # Frames

    def receive(self, frame: Frame, now_ns: int) -> None:
        """What the receive thread reads. A dead one reads nothing."""
        if not self.receiving:
            self.counters["frames_unread"] += 1
        elif isinstance(frame, Metadata):
            self._metadata(frame)
        elif isinstance(frame, Abort):
            self._aborted(frame)
        else:
            raise ValueError(f"a prefill takes Metadata and Abort frames, not {type(frame).__name__}")

    def _metadata(self, frame: Metadata) -> None:
        if frame.room in self._tombstones:
            self._send(frame.peer, KvStatus(frame.room, KVPoll.FAILED, self.rank, "The prefill has given up this room."))
            return
        known = self.destinations.setdefault(frame.room, {})
        known[frame.peer] = frame
        if len(known) == frame.required_dst_info_num:
            self.table.update(frame.room, KVPoll.WAITING_FOR_INPUT)

    def _aborted(self, frame: Abort) -> None:
        mode = self.config.profile.prefill_on_abort
        if mode == "dies":
            self.receiving = False
        if mode not in ("fail", "ack"):
            return
        if self.table.get(frame.room) not in (None, KVPoll.SUCCESS):
            self.reasons.setdefault(frame.room, ABORTED_BY_DECODE)
            self.table.update(frame.room, KVPoll.FAILED)
        if mode == "ack" and frame.generation is not None:
            self._acks.setdefault(frame.room, []).append((frame.peer, frame.generation))
            self._acknowledge(frame.room)

    def _acknowledge(self, room: int) -> None:
        """Once no chunk of the room is under way; never for a poisoned one."""
        if self._under_way.get(room):
            return
        for peer, generation in self._acks.pop(room, ()):
            if room not in self.poisoned:
                self._send(peer, AbortAck(room, self.rank, generation))

    def _send(self, to: str, frame: Frame) -> None:
        self.outgoing.append(Outgoing(self.rank, to, frame))

    # Rooms, as the sender sees them

    def open(self, room: int) -> None:
        self.senders[room] += 1
        self.poisoned.discard(room)
        if self.table.update(room, KVPoll.BOOTSTRAPPING).creates:
            self._acks.pop(room, None)

    def fail(self, room: int, reason: str) -> None:
        """The scheduler fails a room."""
        self.reasons.setdefault(room, reason)
        self.table.update(room, KVPoll.FAILED)

    def clear(self, room: int) -> None:
        """Forget a room. Chunks of it under way go on."""
        self.table.clear(room)
        self.disown(room)
        for records in (self.destinations, self.reasons, self._chunks, self._aux):
            records.pop(room, None)
        if not self.config.profile.ack_survives_clear:
            self._acks.pop(room, None)
        for handle in self.inline.pop(room, ()):
            self.backend.release(handle)
        if self.config.profile.tombstones:
            self._bury(room)

    def disown(self, room: int) -> None:
        """A sender goes and leaves the room's records behind."""
        self.senders[room] -= 1
        if not self.senders[room]:
            del self.senders[room]

    def _bury(self, room: int) -> None:
        self._tombstones[room] = None
        if len(self._tombstones) > _TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def reason(self, room: int) -> str:
        return self.reasons.get(room, "Failed due to an unknown reason from another rank")

    def stray_rooms(self) -> list[int]:
        """Rooms in the table that no sender owns: nobody polls them, nobody clears them."""
        return [room for room in self.table if room not in self.senders]

    # Chunks

    def send(self, room: int, first: int, count: int, aux: Aux | None, now_ns: int) -> None:
        """Hand over destination pages first … first + count - 1; `aux` with the last chunk."""
        chunks = self._chunks.setdefault(room, [])
        chunk = Chunk(room, len(chunks), aux is not None, now_ns)
        chunks.append((first, count))
        if aux is not None:
            self._aux[room] = aux
        if self.config.profile.async_worker:
            self.workers[self._queue_of(room)].queue.append(chunk)
        else:
            posted = [self.backend.post(write, now_ns) for write in self.writes_of(chunk)]
            self.inline.setdefault(room, []).extend(posted)

    def _queue_of(self, room: int) -> int:
        """Sum of the destination ports, modulo the number of queues."""
        return sum(port_of(peer) for peer in self.destinations.get(room, ())) % len(self.workers)

    def writes_of(self, chunk: Chunk) -> list[Write]:
        pages = self._chunks.get(chunk.room, ())
        if chunk.number >= len(pages):
            return []
        first, count = pages[chunk.number]
        aux = self._aux.get(chunk.room) if chunk.is_last else None
        return [
            self._write_to(target, chunk, target.pages[first : first + count], aux)
            for target in self.destinations.get(chunk.room, {}).values()
            if not target.dummy
        ]

    def _write_to(self, target: Metadata, chunk: Chunk, pages: Sequence[int], aux: Aux | None) -> Write:
        frame = KvChunk(chunk.room, chunk.number, chunk.is_last, self.rank, tuple(pages), target.stamp, target.aux_index, aux)
        return Write(target.peer, frame, len(pages) * self._page_bytes)

    def begin_chunk(self, room: int) -> None:
        self._under_way[room] += 1

    def end_chunk(self, room: int, *, settled: bool, now_ns: int) -> None:
        self._under_way[room] -= 1
        if not self._under_way[room]:
            del self._under_way[room]
        if not settled:
            self.poisoned.add(room)
        self._acknowledge(room)

    def chunk_sent(self, chunk: Chunk, now_ns: int) -> None:
        if chunk.is_last:
            self._conclude(chunk.room, KVPoll.SUCCESS, "")
        elif not self.config.profile.conclude_checks:
            self.table.update(chunk.room, KVPoll.TRANSFERRING)

    def chunk_failed(self, chunk: Chunk, reason: str, *, settled: bool, now_ns: int) -> None:
        self._conclude(chunk.room, KVPoll.FAILED, reason, silent=not settled)

    def _conclude(self, room: int, status: KVPoll, reason: str, *, silent: bool = False) -> None:
        """Write the final status and tell the decode. A success that has a failure on record is a failure."""
        profile = self.config.profile
        if profile.conclude_checks and room not in self.table:
            return
        asked = status
        if status is KVPoll.SUCCESS and profile.conclude_checks and self._has_failed(room):
            status = KVPoll.FAILED
        if status is KVPoll.FAILED:
            self.reasons.setdefault(room, reason or "The transfer failed.")
        peers = list(self.destinations.get(room, ()))
        self.table.update(room, status)
        told = profile.success_notice if asked is KVPoll.SUCCESS else profile.failure_notice and not silent
        for peer in peers if told else ():
            self._send(peer, KvStatus(room, status, self.rank, self.reasons.get(room, "")))

    def _has_failed(self, room: int) -> bool:
        return room in self.reasons or self.table.get(room) is KVPoll.FAILED

    # Time

    def next_event_at(self, now_ns: int) -> int | None:
        times = [self.backend.next_event_at(), *(worker.next_at(now_ns) for worker in self.workers)]
        return min((at for at in times if at is not None), default=None)

    def run(self, now_ns: int) -> bool:
        """Transport and workers catch up; writes that landed become frames for the decode. False: nothing was due."""
        at = self.next_event_at(now_ns)
        if at is None or at > now_ns:
            return False
        for write in self.backend.run(now_ns):
            self._send(write.peer, write.chunk)
        for worker in self.workers:
            worker.run(now_ns)
        return True
