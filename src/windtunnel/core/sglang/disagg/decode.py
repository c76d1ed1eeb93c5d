"""The decode worker: prealloc queue → transfer queue → waiting → running, and the retracted queue (SGLang reference §3.2).

One iteration of the loop brings back retracted requests (and looks no further while any are left), resolves pending ones,
polls the handshakes, pre-allocates in order, polls the transfers, and then decodes; it never prefills. A request whose KV has
come joins the running batch without a forward pass.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import partial

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, Refusal
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.admission import CLIP_MAX_NEW_TOKENS
from windtunnel.core.sglang.batch import Batch
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import FAKE_HOST, DisaggConfig
from windtunnel.core.sglang.disagg.decode_rank import DecodeRank
from windtunnel.core.sglang.disagg.peers import Prefills
from windtunnel.core.sglang.disagg.receiver import KvReceiver, RoomReceiver
from windtunnel.core.sglang.disagg.release import DeferredReleases
from windtunnel.core.sglang.disagg.topology import Topology, targets_of
from windtunnel.core.sglang.disagg.worker import QUEUE_ABORT, DisaggWorker, RoomEntry, failure_message, refusal_without_room
from windtunnel.core.sglang.memory import HeldPages, Holder
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import RUNNING_ABORT, SglangSequence
from windtunnel.core.transfer.backends import FakeReceiver
from windtunnel.core.transfer.frames import Aux, Frame, LateWrite, Metadata, Outgoing
from windtunnel.core.transfer.status import KVPoll, reduce_polls
from windtunnel.core.units import MS

NO_BACKUP = EngineError("Retracted under decode memory pressure without a KV backup. Retry later.", 503, "ServiceUnavailable")
EXTRA_ROWS_UP_TO = 32
"""With no more running requests than this, twice as many rows are kept for transfers (reference §3.2)."""
MAX_HOLD_NS = 1 << 62


class DecodeEntry(RoomEntry):
    """One request on the decode worker."""

    __slots__ = ("aux", "dp_rank", "ready", "ready_ns", "receivers", "resolved")

    def __init__(self, sequence: SglangSequence, address: str, room: int, receivers: list[KvReceiver]) -> None:
        super().__init__(sequence, address, room)
        self.receivers = receivers
        self.resolved = False
        """The prefill's ranks are known."""
        self.ready = False
        """The handshake is done."""
        self.ready_ns = 0
        self.dp_rank: int | None = None
        self.aux: Aux | None = None

    @property
    def fake(self) -> bool:
        return isinstance(self.receivers[0], FakeReceiver)

    @property
    def rooms(self) -> list[RoomReceiver]:
        return [receiver for receiver in self.receivers if isinstance(receiver, RoomReceiver)]


class DecodeWorker(DisaggWorker):
    """One data-parallel rank of decode. An `Engine`, and besides: frames, topologies and heartbeats come in as calls."""

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

    # One iteration

    def poll(self, now_ns: int) -> None:
        released = self.deferred.run(now_ns)
        self.observations += [("decode_deferred_kv_release_seconds", held_s) for held_s in released]
        self._resume_retracted(now_ns)
        if self.retracted_queue:
            return
        try:
            self._resolve(now_ns)
            self._poll_handshakes(now_ns)
            self._preallocate(now_ns)
            self._poll_transfers(now_ns)
        except KeyError as missing:
            self.kill(now_ns, f"KeyError: {missing}")

    # Pending requests

    def _pending(self) -> list[DecodeEntry]:
        return [entry for entry in self.prealloc_queue.values() if not entry.resolved]

    def _resolve(self, now_ns: int) -> None:
        """Give a usable receiver to everybody whose prefill is known; ask about the others."""
        without_rank: dict[str, list[int]] = {}
        for entry in self._pending():
            topology = self.prefills[entry.address]
            if entry.fake or topology is not None:
                self._resolve_one(entry, topology)
                if not entry.resolved:
                    without_rank.setdefault(entry.address, []).append(entry.room)
            elif (question := self.prefills.question(entry.address, now_ns)) is not None:
                self.queries.append(question)
        for address, rooms in without_rank.items():
            if (question := self.prefills.dp_question(address, rooms, now_ns)) is not None:
                self.queries.append(question)

    def _resolve_one(self, entry: DecodeEntry, topology: Topology | None) -> None:
        if topology is not None and entry.dp_rank is None:
            entry.dp_rank = _derived_rank(topology, entry.room)
        if topology is not None and entry.dp_rank is None and not entry.fake:
            return
        if topology is not None and entry.dp_rank is not None and entry.dp_rank >= topology.dp_size:
            self._fail_rooms(entry, f"Prefill dp rank {entry.dp_rank} is not one of the {topology.dp_size} of {entry.address}")
            return
        entry.resolved = True
        for at, receiver in enumerate(entry.receivers):
            if isinstance(receiver, FakeReceiver):
                receiver.init()
            elif isinstance(receiver, RoomReceiver) and topology is not None:
                receiver.init(targets_of(topology, entry.dp_rank or 0, at, len(self.ranks)))

    # Handshake and pre-allocation

    def _polls(self, entries: Sequence[DecodeEntry], now_ns: int) -> list[KVPoll]:
        """One status for each entry, the same on all ranks."""
        if not entries:
            return []
        ranks = range(len(self.ranks))
        return reduce_polls([[self._gated(entry, rank, now_ns) for entry in entries] for rank in ranks])

    def _gated(self, entry: DecodeEntry, rank: int, now_ns: int) -> KVPoll:
        """A success counts as Transferring until the metadata buffer names a room."""
        status = entry.receivers[rank].poll(now_ns)
        if status is KVPoll.SUCCESS and entry.slot is not None and not entry.fake:
            aux = self.ranks[rank].buffers.get(entry.slot)
            if aux is None or not aux.room:
                return KVPoll.TRANSFERRING
        return status

    def _poll_handshakes(self, now_ns: int) -> None:
        entries = [entry for entry in self.prealloc_queue.values() if self.profile.ready_handshakes_polled or not entry.ready]
        for entry, status in zip(entries, self._polls(entries, now_ns), strict=True):
            if status is KVPoll.FAILED:
                self._fail(entry, "Decode handshake failed", "num_bootstrap_failed_reqs_total", now_ns)
            elif status is KVPoll.WAITING_FOR_INPUT and entry.resolved and not entry.ready:
                entry.ready, entry.ready_ns = True, now_ns

    def _preallocate(self, now_ns: int) -> None:
        """In order; the first that does not fit ends it."""
        for entry in list(self.prealloc_queue.values()):
            if entry.ready and not self._try_preallocate(entry, now_ns):
                return

    def _try_preallocate(self, entry: DecodeEntry, now_ns: int) -> bool:
        sequence, memory = entry.sequence, self.scheduler.memory
        if not self.slots.free or not self.rows.free:
            return False
        prefix = memory.attach(sequence)
        needed = memory.missing_pages(sequence, sequence.prompt_len) * memory.page_size
        if needed > self._allocatable(self._retracted_tokens()) or not memory.grow(sequence, sequence.prompt_len):
            memory.release(sequence)
            return False
        entry.slot, entry.row = self.slots.take(sequence.tag), self.rows.take(sequence.tag)
        assert entry.slot is not None, "a free slot is not there"
        del self.prealloc_queue[sequence]
        self.transfer_queue[sequence] = entry
        self._await_transfer(entry, entry.slot, prefix, now_ns)
        return True

    def _await_transfer(self, entry: DecodeEntry, slot: int, prefix: int, now_ns: int) -> None:
        sequence = entry.sequence
        pages = tuple(sequence.pages[sequence.held :])
        stamp = self.scheduler.memory.pool.stamp_of(pages[0]) if pages else 0
        for rank in self.ranks:
            rank.buffers.pop(slot, None)
        self.observations += [
            ("kv_transfer_bootstrap_ms", (entry.ready_ns - sequence.since_ns) / MS),
            ("kv_transfer_alloc_ms", (now_ns - entry.ready_ns) / MS),
        ]
        self.log.record(sequence, Event.FETCH, now_ns, {"room": entry.room, "slot": slot, "pages": len(pages)})
        for receiver in entry.receivers:
            receiver.send_metadata(pages, stamp, slot, prefix, now_ns)

    def _allocatable(self, kept_for_retracted: int) -> int:
        """Tokens that may be pre-allocated: what is there, less what those under way will need (reference §3.2)."""
        memory, running = self.scheduler.memory, self.scheduler.running
        active = [*running, *self.scheduler.waiting, *self.transfer_queue]
        retractable = sum(sequence.num_tokens for sequence in running)
        one = max((min(seq.output_limit, CLIP_MAX_NEW_TOKENS) + seq.prompt_len - retractable for seq in running), default=0)
        reserve = max(self.disagg.num_reserved_decode_tokens * len(active), one)
        return memory.available_tokens + memory.evictable_tokens - reserve - kept_for_retracted

    def _retracted_tokens(self) -> int:
        return sum(self.scheduler.memory.whole(sequence.num_tokens) for sequence in self.retracted_queue)

    # Transfer

    def _poll_transfers(self, now_ns: int) -> None:
        entries = list(self.transfer_queue.values())
        for entry, status in zip(entries, self._polls(entries, now_ns), strict=True):
            if status is KVPoll.FAILED:
                self._fail(entry, "Decode transfer failed", "num_transfer_failed_reqs_total", now_ns)
            elif status is KVPoll.SUCCESS:
                self._commit(entry, now_ns)

    def _commit(self, entry: DecodeEntry, now_ns: int) -> None:
        """The KV has come: check whose it is, and queue for the running batch."""
        sequence = entry.sequence
        assert entry.slot is not None, "a transfer without a slot"
        entry.aux = None if entry.fake else self.ranks[0].buffers[entry.slot]
        if entry.aux is not None and entry.aux.room != entry.room and self.profile.metadata_room_check:
            self.count("num_transfer_failed_reqs_total")
            self._end_queued(entry, EngineError("Metadata corruption detected - bootstrap_room mismatch"), now_ns)
            return
        sequence.computed = sequence.prompt_len
        if entry.aux is not None:
            sequence.cached_tokens = entry.aux.cached_tokens
        del self.transfer_queue[sequence]
        self._free_slot(entry)
        for receiver in entry.receivers:
            receiver.clear()
        self.log.record(sequence, Event.FETCHED, now_ns)
        self.scheduler.enqueue(sequence, now_ns)

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

    # Running

    def plan(self, now_ns: int) -> Batch | None:
        """Take in whoever's KV has come; they decode with everybody else."""
        scheduler = self.scheduler
        for sequence in list(scheduler.waiting):
            if len(scheduler.running) >= self.config.max_running_requests:
                break
            del scheduler.waiting[sequence]
            self._start_decoding(sequence, now_ns)
        return scheduler.plan_decode(now_ns)

    def _start_decoding(self, sequence: SglangSequence, now_ns: int) -> None:
        """The prebuilt batch: the prefill's first token is appended, nothing is computed."""
        entry = self.entries[sequence]
        self.log.record(sequence, Event.SCHEDULE, now_ns, {"prebuilt": 1})
        self.log.record(sequence, Event.FIRST_TOKEN, now_ns)
        sequence.started_ns = sequence.ready_at_ns = now_ns
        self.scheduler.running[sequence] = None
        self.scheduler.memory.publish(sequence, sequence.computed)
        if entry.aux is None:
            self.next_token(sequence, now_ns, self.notices)
            return
        token = entry.aux.first_token
        ended = not sequence.request.source.token_ids(0, 1)
        self.emit(sequence, sequence.accept(token if token >= 0 else None, ended=ended), now_ns, self.notices)

    # Retraction

    def requeue_retracted(self, retracted: Sequence[SglangSequence], now_ns: int) -> None:
        """Into the retracted queue, KV in a backup; without one they fail."""
        for sequence in retracted:
            entry = self.entries[sequence]
            if self.disagg.retraction == "none":
                self.fail(sequence, NO_BACKUP, now_ns)
                continue
            self._free_row(entry)
            self.retracted_queue[sequence] = entry

    def _free_row(self, entry: DecodeEntry) -> None:
        if entry.row is not None:
            self.rows.give_back(entry.row, entry.sequence.tag)
            entry.row = None

    def _resume_retracted(self, now_ns: int) -> None:
        """In order, as long as memory, a row and a place are there; the KV comes back from the backup."""
        for sequence, entry in list(self.retracted_queue.items()):
            if sequence.abort is None and not self._try_resume(sequence, entry, now_ns):
                return

    def _try_resume(self, sequence: SglangSequence, entry: DecodeEntry, now_ns: int) -> bool:
        scheduler = self.scheduler
        needed = scheduler.memory.whole(sequence.num_tokens)
        if not self.rows.free or len(scheduler.running) >= self.config.max_running_requests:
            return False
        if needed > self._allocatable(0) or not scheduler.memory.grow(sequence, sequence.num_tokens):
            return False
        entry.row = self.rows.take(sequence.tag)
        del self.retracted_queue[sequence]
        sequence.computed = sequence.num_tokens - 1
        self.log.record(sequence, Event.SCHEDULE, now_ns, {"resumed": 1})
        self.log.record(sequence, Event.FIRST_TOKEN, now_ns)
        sequence.ready_at_ns = max(sequence.ready_at_ns, now_ns)
        scheduler.running[sequence] = None
        scheduler.await_turn(sequence)
        return True

    # Aborts (§5)

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

    # Time

    def timer_next_at(self) -> int | None:
        queued = [*self.prealloc_queue.values(), *self.transfer_queue.values()]
        times = [receiver.deadline_ns() for entry in queued for receiver in entry.receivers]
        times.append(self.prefills.next_question_at({entry.address for entry in self._pending() if not entry.fake}))
        if self.retracted_queue:
            times.clear()
        times.append(self.deferred.deadline_ns())
        return min((at for at in times if at is not None), default=None)

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


def _derived_rank(topology: Topology, room: int) -> int | None:
    """The prefill's DP rank, where it can be known without asking (reference §2.5)."""
    if topology.dp_size == 1:
        return 0
    return room % topology.dp_size if topology.follow_bootstrap_room else None
