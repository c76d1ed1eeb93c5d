"""The prefill worker: bootstrap queue → waiting queue → prefill in chunks → inflight queue (SGLang reference §3.1).

One iteration of the loop polls the senders of all queues, reduced with MIN over the ranks, and then prefills; it never
decodes. The transfer workers run beside it. What an abort does depends on the queue (§5).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, FinishReason, Refusal, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.batch import Batch, Entry
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import FAKE_HOST, DisaggConfig
from windtunnel.core.sglang.disagg.prefill_rank import PrefillRank
from windtunnel.core.sglang.disagg.sender import KvSender, RoomSender
from windtunnel.core.sglang.disagg.worker import QUEUE_ABORT, DisaggWorker, RoomEntry, failure_message, refusal_without_room
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import RUNNING_ABORT, WAITING_ABORT, SglangSequence
from windtunnel.core.transfer.backends import FakeSender, TransferBackend
from windtunnel.core.transfer.frames import Aux, Frame, Outgoing, RegisterDpRank
from windtunnel.core.transfer.status import KVPoll, reduce_polls
from windtunnel.core.units import MS, S


class PrefillEntry(RoomEntry):
    """One request on the prefill worker."""

    __slots__ = ("bootstrap_ns", "first_token", "keeps_room", "keeps_slot", "senders", "sent_pages", "sent_since_ns")

    def __init__(self, sequence: SglangSequence, address: str, room: int, senders: list[KvSender]) -> None:
        super().__init__(sequence, address, room)
        self.senders = senders
        self.sent_pages = 0
        self.sent_since_ns = 0
        self.bootstrap_ns = 0
        """How long it waited in the bootstrap queue."""
        self.first_token: TokenOutput | None = None
        self.keeps_slot = False
        """Its slot is never given back: the leak of old releases (P14)."""
        self.keeps_room = False
        """Its room is never cleared: the leak of old releases (reference §1.6, ending 4)."""


class PrefillWorker(DisaggWorker):
    """One data-parallel rank of prefill. An `Engine`, and besides: `receive` frames, `take_outgoing` what is to be sent."""

    def __init__(
        self,
        config: SglangEngineConfig,
        disagg: DisaggConfig,
        pacing: Pacing,
        chance: Chance,
        make_backend: Callable[[int], TransferBackend],
    ) -> None:
        """`make_backend(rank)` gives each rank its transport."""
        if disagg.transfer_backend != "sim":
            raise ValueError(f"transfer_backend is {disagg.transfer_backend!r}: a prefill worker takes only 'sim'")
        super().__init__(config, disagg, pacing, chance, rows=config.max_running_requests)
        self.ranks = [PrefillRank(disagg, rank, config.page_size, make_backend(rank)) for rank in range(disagg.tp_size)]
        self.entries: dict[SglangSequence, PrefillEntry] = {}
        self.bootstrap_queue: dict[SglangSequence, PrefillEntry] = {}
        self.inflight_queue: dict[SglangSequence, PrefillEntry] = {}
        self.scheduler.decodes = False
        self._unread_aborts: list[PrefillEntry] = []
        self._leaked_slots: dict[int, str] = {}
        self._now_ns = 0

    @property
    def managers(self) -> Sequence[PrefillRank]:
        return self.ranks

    def entry_of(self, sequence: SglangSequence) -> PrefillEntry:
        return self.entries[sequence]

    # Arrivals

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """Admit all or none; each needs a room, and makes one token. Raises ValueError for a live or repeated id."""
        self.check(requests)
        self.wake(now_ns)
        refusal = self.refusal_of(requests) or refusal_without_room(requests)
        if refusal is not None:
            self.record_refusals(requests, refusal, now_ns)
            return refusal
        for request in requests:
            self._enter(replace(request, max_tokens=1), now_ns)
        return None

    def _enter(self, request: EngineRequest, now_ns: int) -> None:
        host, port, room = request.bootstrap or ("", None, 0)
        sequence = self.new_sequence(request, now_ns)
        entry = PrefillEntry(sequence, f"{host}:{port}", room, self._make_senders(host, room, now_ns))
        self.sequences[sequence.request_id] = sequence
        self.entries[sequence] = self.bootstrap_queue[sequence] = entry
        self.log.record(sequence, Event.BOOTSTRAP, now_ns, {"room": room, "prompt_tokens": sequence.prompt_len})
        if not self.disagg.follow_bootstrap_room and host != FAKE_HOST:
            self.queries.append(Outgoing(0, entry.address, RegisterDpRank(room, self.disagg.dp_rank)))

    def _make_senders(self, host: str, room: int, now_ns: int) -> list[KvSender]:
        if host == FAKE_HOST:
            return [FakeSender(self.disagg.waiting_timeout_ns) for _ in self.ranks]
        return [RoomSender(rank, room, now_ns) for rank in self.ranks]

    # Frames

    def receive(self, frame: Frame, now_ns: int, rank: int = 0) -> None:
        """A frame for the receive thread of one rank."""
        self._now_ns = max(self._now_ns, now_ns)
        self.ranks[rank].receive(frame, now_ns)
        self.wake(now_ns)

    def lose_peer(self, endpoint: str, now_ns: int) -> None:
        """The decode process behind `endpoint` is gone; the transport will notice in its own time."""
        for rank in self.ranks:
            rank.backend.lose_peer(endpoint, now_ns)

    # Polls

    def poll(self, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        try:
            self._poll_inflight(now_ns)
            self._read_aborts()
            self._poll_bootstrap(now_ns)
            if self.profile.waiting_queue_polled:
                self._poll_waiting(now_ns)
        except KeyError as missing:
            self.kill(now_ns, f"KeyError: {missing}")

    def _polls(self, entries: Sequence[PrefillEntry], now_ns: int) -> list[KVPoll]:
        """One status for each entry, the same on all ranks."""
        if not entries:
            return []
        ranks = range(len(self.ranks))
        return reduce_polls([[entry.senders[rank].poll(now_ns) for entry in entries] for rank in ranks])

    def _poll_bootstrap(self, now_ns: int) -> None:
        entries = list(self.bootstrap_queue.values())
        for entry, status in zip(entries, self._polls(entries, now_ns), strict=True):
            if status is KVPoll.FAILED:
                self._fail(entry, "Prefill bootstrap failed", "num_bootstrap_failed_reqs_total", now_ns)
            elif status is KVPoll.WAITING_FOR_INPUT:
                self._bootstrapped(entry, now_ns)
            elif status is not KVPoll.BOOTSTRAPPING:
                self.kill(now_ns, f"RuntimeError: unexpected poll {status.name} in the bootstrap queue")
                return

    def _bootstrapped(self, entry: PrefillEntry, now_ns: int) -> None:
        """On to the waiting queue, if there is a metadata slot."""
        sequence = entry.sequence
        entry.slot = self.slots.take(sequence.tag)
        if entry.slot is None:
            return
        for sender in entry.senders:
            sender.init()
        del self.bootstrap_queue[sequence]
        entry.bootstrap_ns = now_ns - sequence.since_ns
        self.log.record(sequence, Event.BOOTSTRAPPED, now_ns, {"slot": entry.slot})
        self.scheduler.enqueue(sequence, now_ns)

    def _poll_waiting(self, now_ns: int) -> None:
        entries = [self.entries[sequence] for sequence in self.scheduler.waiting]
        for entry, status in zip(entries, self._polls(entries, now_ns), strict=True):
            if status is KVPoll.FAILED:
                self._fail(entry, "Prefill bootstrap failed", "num_bootstrap_failed_reqs_total", now_ns)

    def _poll_inflight(self, now_ns: int) -> None:
        entries = list(self.inflight_queue.values())
        for entry, status in zip(entries, self._polls(entries, now_ns), strict=True):
            if status is KVPoll.SUCCESS:
                self._succeed(entry, now_ns)
            elif status is KVPoll.FAILED:
                self._fail(entry, "Prefill transfer failed", "num_transfer_failed_reqs_total", now_ns)
            elif status is KVPoll.BOOTSTRAPPING and self.profile.inflight_bootstrapping_fatal:
                self.kill(now_ns, "RuntimeError: unexpected poll BOOTSTRAPPING in the inflight queue")
                return

    def _fail(self, entry: PrefillEntry, what: str, counter: str, now_ns: int) -> None:
        self.count(counter)
        message = failure_message(what, "req", entry, entry.senders)
        self.fail(entry.sequence, EngineError(message), now_ns)

    def _succeed(self, entry: PrefillEntry, now_ns: int) -> None:
        """Answer with the one token and `length`, even if an abort came meanwhile (P5)."""
        sequence, first = entry.sequence, entry.first_token
        assert first is not None, "a transfer succeeded before its prefill"
        if sequence.abort is not None and self.profile.success_honours_abort:
            self.end_aborted(sequence, sequence.abort, now_ns)
            return
        self._observe_transfer(entry, now_ns)
        if sequence.abort is None or sequence.notify_abort:
            self.notices.append(first._replace(finish_reason=FinishReason.LENGTH, stop_reason=None))
        self.scheduler.remove(sequence)
        self.log.record(sequence, Event.FINISH, now_ns, {"reason": "length", "output_tokens": len(sequence.output)})
        self.forget(sequence)

    def _observe_transfer(self, entry: PrefillEntry, now_ns: int) -> None:
        """At success, in the units of SGLang 0.5.23: MiB, and GiB per second. Nothing waits between handshake and queue."""
        self.observations += [("kv_transfer_bootstrap_ms", entry.bootstrap_ns / MS), ("kv_transfer_alloc_ms", 0.0)]
        took_ns = now_ns - entry.sent_since_ns
        if took_ns <= 0:
            return
        size_mib = len(entry.sequence.pages) * self.config.page_size * self.disagg.kv_bytes_per_token / 2**20
        self.observations += [
            ("kv_transfer_latency_ms", took_ns / MS),
            ("kv_transfer_total_mb", size_mib),
            ("kv_transfer_speed_gb_s", size_mib / 1024 / (took_ns / S)),
        ]

    # Prefill

    def plan(self, now_ns: int) -> Batch | None:
        self.scheduler.places_taken = self.rows.count - self.rows.free
        batch = self.scheduler.plan_prefill(now_ns)
        for part in batch.entries if batch is not None else ():
            entry = self.entries[part.sequence]
            if entry.row is None:
                entry.row = self.rows.take(part.sequence.tag)
        if batch is not None:
            self.reports.running_of_batch = len(batch.entries) if self.profile.running_gauge_of_batch else 0
        return batch

    def chunk_done(self, entry: Entry, at_ns: int) -> None:
        """Whole pages are sent at once; a page that is not full waits for the next chunk."""
        super().chunk_done(entry, at_ns)
        self._send_upto(self.entries[entry.sequence], entry.upto // self.config.page_size, None, at_ns)

    def prefill_done(self, entry: Entry, at_ns: int, outputs: list[TokenOutput]) -> None:
        """The first token is kept until the transfer has ended; the last chunk takes it along."""
        sequence = entry.sequence
        held = self.entries[sequence]
        self.scheduler.memory.publish(sequence, entry.upto)
        held.first_token = sequence.next_token(self.config.eos_token_id)
        token = held.first_token.token_ids[0] if held.first_token.token_ids else -1
        self.log.record(sequence, Event.HAND_OVER, at_ns, {"room": held.room})
        self.inflight_queue[sequence] = held
        pages = self.scheduler.memory.pages_for(sequence.prompt_len)
        self._send_upto(held, pages, Aux(held.room, token, sequence.cached_tokens), at_ns)

    def _send_upto(self, entry: PrefillEntry, pages: int, aux: Aux | None, now_ns: int) -> None:
        """Hand over the prompt's pages up to `pages`, as positions after the decode's own prefix."""
        self._now_ns = max(self._now_ns, now_ns)
        skipped = entry.senders[0].prefix_tokens // self.config.page_size
        first = max(entry.sent_pages, skipped)
        if pages <= first and aux is None:
            return
        entry.sent_since_ns = entry.sent_since_ns or now_ns
        entry.sent_pages = max(first, pages)
        for sender in entry.senders:
            sender.send(first - skipped, entry.sent_pages - first, aux, now_ns)

    # Aborts (§5)

    def abort_in_place(self, sequence: SglangSequence, now_ns: int) -> None:
        entry = self.entries[sequence]
        if self.disagg.abort_loses_peer:
            for rank in self.ranks:
                rank.backend.abandon(entry.room, now_ns)
        if sequence in self.scheduler.waiting:
            entry.keeps_slot = not self.profile.waiting_abort_frees_slot
            entry.keeps_room = not self.profile.abort_clears_room
            self._abort_senders(entry)
            self.end_aborted(sequence, WAITING_ABORT, now_ns)
        elif sequence is self.scheduler.chunked:
            self.abort_later(sequence, RUNNING_ABORT)
        elif self.batch is not None and self.batch.prefills(sequence):
            self._abort_under_way(sequence, entry)
        else:
            sequence.abort = QUEUE_ABORT
            self._abort_senders(entry)

    def _abort_under_way(self, sequence: SglangSequence, entry: PrefillEntry) -> None:
        """An AbortReq is read between batches. Without overlap the request is inflight by then. With overlap its results are
        still to be processed: it gets a finish reason, its sender hears nothing, and only the transfer's end counts (P5, P42).
        """
        sequence.abort = QUEUE_ABORT
        if not self.config.overlap:
            self._unread_aborts.append(entry)

    def _read_aborts(self) -> None:
        """Those that came during the last batch. The poll that sees them follows the next batch, if there is one."""
        entries, self._unread_aborts = self._unread_aborts, []
        for entry in entries:
            if entry.sequence in self.entries:
                self._abort_senders(entry)
                self._awake = True

    def end_aborted(self, sequence: SglangSequence, reason: EngineError, now_ns: int) -> None:
        """Of a chunk in progress the sender is aborted only here, when the next iteration comes."""
        entry = self.entries[sequence]
        if reason is RUNNING_ABORT:
            entry.keeps_room = not self.profile.abort_clears_room
            self._abort_senders(entry)
        super().end_aborted(sequence, reason, now_ns)

    def _abort_senders(self, entry: PrefillEntry) -> None:
        for sender in entry.senders:
            sender.abort()

    def forget(self, sequence: SglangSequence) -> None:
        """Every end of a request comes by here, once: rooms, slot and row."""
        super().forget(sequence)
        entry = self.entries.pop(sequence)
        self.bootstrap_queue.pop(sequence, None)
        self.inflight_queue.pop(sequence, None)
        for sender in entry.senders:
            if entry.keeps_room:
                sender.disown()
            else:
                sender.clear()
        if entry.slot is not None and entry.keeps_slot:
            self._leaked_slots[entry.slot] = sequence.tag
        elif entry.slot is not None:
            self.slots.give_back(entry.slot, sequence.tag)
        if entry.row is not None:
            self.rows.give_back(entry.row, sequence.tag)

    # Time

    def timer_next_at(self) -> int | None:
        queued = [*self.bootstrap_queue.values(), *self.inflight_queue.values()]
        deadlines = [sender.deadline_ns() for entry in queued for sender in entry.senders]
        return min((at for at in deadlines if at is not None), default=None)

    def background_next_at(self) -> int | None:
        times = [rank.next_event_at(self._now_ns) for rank in self.ranks]
        return min((at for at in times if at is not None), default=None)

    def run_background(self, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        for rank in self.ranks:
            if rank.run(now_ns):
                self._awake = True
                self.clock_ns = max(self.clock_ns, now_ns) if self.batch is None else self.clock_ns

    # Looking in

    def queue_gauges(self) -> Mapping[str, float]:
        return {
            self.profile.bootstrap_gauge: len(self.bootstrap_queue),
            self.profile.inflight_gauge: len(self.inflight_queue),
            "utilization": -1 if self.profile.running_gauge_of_batch else 0,
        }

    def queue_of(self, sequence: SglangSequence) -> str:
        if sequence in self.bootstrap_queue:
            return "bootstrap"
        if sequence in self.inflight_queue:
            return "inflight"
        return "waiting" if sequence in self.scheduler.waiting else "prefill"

    def outstanding(self) -> dict[str, int]:
        return {**super().outstanding(), "stray_rooms": sum(len(rank.stray_rooms()) for rank in self.ranks)}

    def ownerless_slots(self) -> Mapping[int, str]:
        return self._leaked_slots

    def check_integrity(self) -> None:
        super().check_integrity()
        for rank in self.ranks:
            ends = (entry for entry in self.entries.values() if isinstance(entry.senders[rank.rank], RoomSender))
            assert rank.senders == Counter(entry.room for entry in ends), "senders and requests do not match"
