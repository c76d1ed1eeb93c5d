"""The decode worker: prealloc queue → transfer queue → waiting → running, and the retracted queue (SGLang reference §3.2).

One iteration of the loop brings back retracted requests (and looks no further while any are left), resolves pending ones,
polls the handshakes, pre-allocates in order, polls the transfers, and then decodes; it never prefills. A request whose KV has
come joins the running batch without a forward pass.
"""

from collections.abc import Sequence

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError
from windtunnel.core.sglang.admission import CLIP_MAX_NEW_TOKENS
from windtunnel.core.sglang.batch import Batch
from windtunnel.core.sglang.disagg.decode_entry import DecodeEntry
from windtunnel.core.sglang.disagg.decode_queues import DecodeQueues
from windtunnel.core.sglang.disagg.receiver import RoomReceiver
from windtunnel.core.sglang.disagg.topology import Topology, targets_of
from windtunnel.core.sglang.sequence import SglangSequence
from windtunnel.core.transfer.backends import FakeReceiver
from windtunnel.core.transfer.status import KVPoll, reduce_polls
from windtunnel.core.units import MS

NO_BACKUP = EngineError("Retracted under decode memory pressure without a KV backup. Retry later.", 503, "ServiceUnavailable")


class DecodeWorker(DecodeQueues):
    """One data-parallel rank of decode. An `Engine`, and besides: frames, topologies and heartbeats come in as calls."""

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

    # Time

    def timer_next_at(self) -> int | None:
        queued = [*self.prealloc_queue.values(), *self.transfer_queue.values()]
        times = [receiver.deadline_ns() for entry in queued for receiver in entry.receivers]
        times.append(self.prefills.next_question_at({entry.address for entry in self._pending() if not entry.fake}))
        if self.retracted_queue:
            times.clear()
        times.append(self.deferred.deadline_ns())
        return min((at for at in times if at is not None), default=None)


def _derived_rank(topology: Topology, room: int) -> int | None:
    """The prefill's DP rank, where it can be known without asking (reference §2.5)."""
    if topology.dp_size == 1:
        return 0
    return room % topology.dp_size if topology.follow_bootstrap_room else None
