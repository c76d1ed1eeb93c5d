"""The queues of a decode worker: who comes in, what comes in for whom, how it ends, and what can be seen of it.

`decode` moves requests from queue to queue (SGLang reference §3.2). Every end of a request goes through `forget`, once.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import partial

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, Refusal
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import FAKE_HOST, DisaggConfig
from windtunnel.core.sglang.disagg.decode_entry import DecodeEntry
from windtunnel.core.sglang.disagg.decode_rank import DecodeRank
from windtunnel.core.sglang.disagg.peers import Prefills
from windtunnel.core.sglang.disagg.receiver import KvReceiver, RoomReceiver
from windtunnel.core.sglang.disagg.release import DeferredReleases
from windtunnel.core.sglang.disagg.topology import Topology
from windtunnel.core.sglang.disagg.worker import QUEUE_ABORT, DisaggWorker, failure_message, refusal_without_room
from windtunnel.core.sglang.memory import HeldPages, Holder
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import RUNNING_ABORT, SglangSequence
from windtunnel.core.transfer.backends import FakeReceiver
from windtunnel.core.transfer.frames import Frame, LateWrite, Metadata, Outgoing
from windtunnel.core.transfer.status import KVPoll

EXTRA_ROWS_UP_TO = 32
"""With no more running requests than this, twice as many rows are kept for transfers (reference §3.2)."""
MAX_HOLD_NS = 1 << 62


class DecodeQueues(DisaggWorker):
    """Base of the decode worker."""

    waiting_holds_pages = True

    def __init__(self, config: SglangEngineConfig, disagg: DisaggConfig, pacing: Pacing, chance: Chance) -> None:
        extra = 2 * config.max_running_requests if config.max_running_requests <= EXTRA_ROWS_UP_TO else 0
        super().__init__(config, disagg, pacing, chance, rows=config.max_running_requests + extra)
        memory = self.scheduler.memory
        memory.caching = disagg.decode_radix_cache and memory.caching
        self.ranks = [DecodeRank(disagg, rank, memory.pool) for rank in range(disagg.tp_size)]
        self.prefills = Prefills(disagg)
        self.entries: dict[SglangSequence, DecodeEntry] = {}
        self.prealloc_queue: dict[SglangSequence, DecodeEntry] = {}
        self.transfer_queue: dict[SglangSequence, DecodeEntry] = {}
        self.retracted_queue: dict[SglangSequence, DecodeEntry] = {}
        self.deferred = DeferredReleases(memory, disagg.deferred_release_timeout_ns)

    @property
    def managers(self) -> Sequence[DecodeRank]:
        return self.ranks

    def entry_of(self, sequence: SglangSequence) -> DecodeEntry:
        return self.entries[sequence]

    # Arrivals

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """Admit all or none; each needs a room. Raises ValueError for a live or repeated id."""
        self.check(requests)
        self.wake(now_ns)
        refusal = self.refusal_of(requests) or (None if self._without_peer else refusal_without_room(requests))
        if refusal is not None:
            self.record_refusals(requests, refusal, now_ns)
            return refusal
        for request in requests:
            self._enter(request, now_ns)
        return None

    @property
    def _without_peer(self) -> bool:
        return self.disagg.transfer_backend == "fake"

    def _enter(self, request: EngineRequest, now_ns: int) -> None:
        host, port, room = request.bootstrap or ("", None, 0)
        sequence = self.new_sequence(request, now_ns)
        receivers: list[KvReceiver]
        if host == FAKE_HOST or self._without_peer:
            receivers = [FakeReceiver() for _ in self.ranks]
        else:
            receivers = [RoomReceiver(rank, room, sequence.arrived, now_ns) for rank in self.ranks]
        entry = DecodeEntry(sequence, f"{host}:{port}", room, receivers)
        wanted = (request.kv_transfer or {}).get("disagg_prefill_dp_rank")
        entry.dp_rank = int(wanted) if wanted is not None else None
        self.sequences[sequence.request_id] = sequence
        self.entries[sequence] = self.prealloc_queue[sequence] = entry
        self.log.record(sequence, Event.PREALLOCATE, now_ns, {"room": room, "prompt_tokens": sequence.prompt_len})

    # Inputs

    def receive(self, frame: Frame, now_ns: int, rank: int = 0) -> None:
        """A write that landed, or a frame for the listener of one rank."""
        self.ranks[rank].receive(frame, now_ns)
        self.wake(now_ns)

    def topology(self, address: str, answer: Topology | None, now_ns: int) -> None:
        """The answer to a `TopologyQuery`; None: it failed."""
        self.wake(now_ns)
        if answer is not None:
            self.prefills.learn(address, answer)
        elif self.prefills.could_not_learn(address, now_ns):
            for entry in self.prealloc_queue.values():
                if entry.address == address and not entry.resolved:
                    self._fail_rooms(entry, f"Could not fetch bootstrap info for: {address}")

    def dp_ranks(self, address: str, ranks: Mapping[int, int], now_ns: int) -> None:
        """The answer to a `DpRankQuery`: room → rank; unknown rooms are left out."""
        self.wake(now_ns)
        for entry in self.prealloc_queue.values():
            if entry.address == address and entry.dp_rank is None:
                entry.dp_rank = ranks.get(entry.room)

    def heartbeat(self, address: str, now_ns: int, *, alive: bool) -> bool:
        """One visit to a prefill's `/health`. True: it is lost, and its rooms have failed."""
        if not self.prefills.heartbeat(address, alive=alive):
            return False
        self.wake(now_ns)
        for entry in [*self.prealloc_queue.values(), *self.transfer_queue.values()]:
            if entry.address == address:
                self._fail_rooms(entry, f"Lost connection with prefill instance (bootstrap_addr: {address})")
        return True

    def send_failed(self, outgoing: Outgoing, now_ns: int) -> None:
        """A frame could not be sent in time. Releases without a send timeout block their scheduler for good (P32)."""
        if not self.profile.zmq_send_timeout:
            self.freeze(MAX_HOLD_NS)
            return
        self.wake(now_ns)
        if not isinstance(outgoing.frame, Metadata):
            return
        for entry in self.transfer_queue.values():
            if entry.room == outgoing.frame.room:
                entry.rooms[outgoing.rank].fail(f"send_metadata to prefill {outgoing.to} failed")
                self._drop_cache(entry.address)

    def _fail_rooms(self, entry: DecodeEntry, reason: str) -> None:
        """From another thread: rooms that have succeeded are left alone."""
        for rank in self.ranks:
            if rank.table.get(entry.room) not in (None, KVPoll.SUCCESS):
                rank.fail(entry.room, reason)

    def _drop_cache(self, address: str) -> None:
        if self.profile.rank_cache_dropped:
            self.prefills.drop(address)

    def take_late_writes(self) -> list[LateWrite]:
        """Writes that landed in pages freed before, since the last call."""
        taken = [write for rank in self.ranks for write in rank.late_writes]
        for rank in self.ranks:
            rank.late_writes = []
        return taken

    # Ends

    def _fail(self, entry: DecodeEntry, what: str, counter: str, now_ns: int) -> None:
        self.count(counter)
        message = failure_message(what, "decode_req.req", entry, entry.receivers)
        if any(receiver.timed_out for receiver in entry.rooms):
            self._drop_cache(entry.address)
        self._end_queued(entry, EngineError(message), now_ns)

    def _end_queued(self, entry: DecodeEntry, error: EngineError, now_ns: int) -> None:
        """End a request of the P/D queues. Its pages may have to wait for the prefill's acknowledgement."""
        sequence = entry.sequence
        waiting = [receiver for receiver in entry.rooms if receiver.awaits_ack]
        if waiting and sequence.pages:
            give_back = partial(self._free_slot_of, entry.slot, sequence.tag)
            self.deferred.hold(HeldPages(sequence), waiting, give_back, now_ns)
            entry.slot = None
        else:
            for receiver in waiting:
                receiver.forget_acks()
        self.fail(sequence, error, now_ns)

    def _free_slot(self, entry: DecodeEntry) -> None:
        self._free_slot_of(entry.slot, entry.sequence.tag)
        entry.slot = None

    def _free_slot_of(self, slot: int | None, tag: str) -> None:
        if slot is not None:
            self.slots.give_back(slot, tag)

    def _free_row(self, entry: DecodeEntry) -> None:
        if entry.row is not None:
            self.rows.give_back(entry.row, entry.sequence.tag)
            entry.row = None

    def abort_in_place(self, sequence: SglangSequence, now_ns: int) -> None:
        if sequence in self.prealloc_queue or sequence in self.transfer_queue:
            sequence.abort = QUEUE_ABORT
            for receiver in self.entries[sequence].receivers:
                receiver.abort()
        elif sequence in self.retracted_queue:
            self.end_aborted(sequence, RUNNING_ABORT, now_ns)
        else:
            super().abort_in_place(sequence, now_ns)

    def forget(self, sequence: SglangSequence) -> None:
        """Every end of a request comes by here, once: rooms, slot and row."""
        super().forget(sequence)
        entry = self.entries.pop(sequence)
        in_queue = sequence in self.prealloc_queue or sequence in self.transfer_queue
        for queue in (self.prealloc_queue, self.transfer_queue, self.retracted_queue):
            queue.pop(sequence, None)
        for receiver in entry.receivers if in_queue else ():
            receiver.clear()
        self._free_slot(entry)
        self._free_row(entry)

    # Looking in

    def counters(self, rank: int = 0) -> Mapping[str, int]:
        """Cumulative counters of one rank, live, by stem; deferred releases as `decode_deferred_kv_release_total:outcome`."""
        deferred = {f"decode_deferred_kv_release_total:{outcome}": n for outcome, n in self.deferred.counters.items()}
        return Counter({**super().counters(rank), **deferred})

    def queue_gauges(self) -> Mapping[str, float]:
        memory = self.scheduler.memory
        wanted = sum(memory.whole(sequence.prompt_len) for sequence in self.prealloc_queue)
        held = sum(len(sequence.pages) for sequence in self.transfer_queue) * memory.page_size
        return {
            "num_decode_prealloc_queue_reqs": len(self.prealloc_queue),
            "num_decode_transfer_queue_reqs": len(self.transfer_queue),
            "num_decode_deferred_kv_release_reqs": len(self.deferred),
            "decode_retracted_queue_reqs": len(self.retracted_queue),
            "pending_prealloc_token_usage": wanted / memory.capacity,
            "prealloc_full_token_usage": held / memory.capacity,
        }

    def holders(self) -> list[Holder]:
        return [*self.sequences.values(), *self.deferred.holders()]

    def queue_of(self, sequence: SglangSequence) -> str:
        if sequence in self.prealloc_queue:
            return "prealloc" if self.entries[sequence].resolved else "pending"
        places: dict[str, Container[SglangSequence]] = {
            "transfer": self.transfer_queue,
            "retracted": self.retracted_queue,
            "waiting": self.scheduler.waiting,
        }
        return next((name for name, place in places.items() if sequence in place), "running")

    def outstanding(self) -> dict[str, int]:
        return {**super().outstanding(), "deferred_releases": len(self.deferred)}

    def ownerless_slots(self) -> Mapping[int, str]:
        held = {item.tag for item in self.deferred.holders()}
        return {slot: tag for slot, tag in self.slots.owners.items() if tag in held}

    def check_integrity(self) -> None:
        super().check_integrity()
        queued = sum(map(len, (self.prealloc_queue, self.transfer_queue, self.retracted_queue)))
        elsewhere = len(self.scheduler.waiting) + len(self.scheduler.running)
        assert queued + elsewhere == len(self.sequences), "a request is in no queue, or in two"
