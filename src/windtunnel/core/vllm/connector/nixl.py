"""The NIXL connectors, pull and push: what is held, what is loaded, who is told (vLLM reference §7.2).

Rules this file lives by:

* Blocks have one owner at a time: a live sequence, a hold (finished, kept for a reader) or an orphaned load (the request has
  gone, the transport still writes). A hold ends by its consumers or by its deadline, an orphaned load only by the transport's
  report.
* Every request that names a prefill causes exactly one word to it: a `Consumed` after its load, at a full cache hit, or when it
  ends before it was scheduled. Not after a failed load: then the prefill's lease runs out.
* The connector never touches a sequence. It returns outcomes, and the engine applies them.

In push mode the decode registers its blocks, the prefill writes and says so. A full cache hit registers nothing, so the prefill
is not told; a write that fails stays the prefill's secret, so the decode waits (vLLM #50754).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector import params as told
from windtunnel.core.vllm.connector.base import Connector, Kept
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.holds import Hold
from windtunnel.core.vllm.connector.loads import Freed, Load, Outcome
from windtunnel.core.vllm.connector.params import Remote
from windtunnel.core.vllm.connector.peers import Heart
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    Ask,
    Consumed,
    HandshakeDone,
    HandshakeFailed,
    Heartbeat,
    MoveDone,
    MoveFailed,
    Notification,
    Notify,
    NotifyFailed,
    Peer,
    Pushed,
    Registration,
    Report,
    StartRead,
    StartWrite,
)

COUNTERS = (
    "nixl_num_failed_transfers",
    "nixl_num_failed_notifications",
    "nixl_num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry",
)
MAX_REGISTRATIONS = 4096
"""Registrations that wait for their prefill to finish; the oldest goes."""

_KEEPS = (FinishReason.STOP, FinishReason.LENGTH)


class NixlConnector(Connector):
    """Owned by one engine. All times are the engine's."""

    series = "nixl"
    counted = COUNTERS

    def __init__(self, config: KvTransferConfig, pool: BlockPool, *, block_size: int, num_blocks: int) -> None:
        super().__init__(config, pool, block_size=block_size, num_blocks=num_blocks)
        self._heart = Heart(config.beat_ns)
        self._wanted: dict[str, Remote] = {}
        """Requests whose KV lies elsewhere and that have not been scheduled yet."""
        self._writes: dict[int, tuple[Hold, StartWrite, int]] = {}
        self._registrations: dict[str, Registration] = {}

    # The life of a request

    def arrived(self, request: EngineRequest, now_ns: int) -> None:
        """A request enters the engine: from here on its prefill hears that it is wanted."""
        params = request.kv_transfer
        pushes = self.config.pushes
        remote = told.remote_of(params, blocks_needed=not pushes)
        if pushes and not told.is_text(request.request_id, told.ID_LIMIT_BYTES):
            remote = None  # the prefill could not be told where to write
        if told.asks_prefill(params):
            if remote is None:
                self.warn(f"Got invalid KVTransferParams: {shown(params)}. This request will not utilize KVTransfer")
                return
            self._heart.start(request.request_id, remote, now_ns)
        elif not (remote is not None and told.asks_decode(params) and self.config.bidirectional_kv_xfer):
            return
        self._wanted[request.request_id] = remote

    def wants(self, request_id: str) -> bool:
        """Whether this request's KV is still to come from elsewhere."""
        return request_id in self._wanted

    def external_tokens(self, request: EngineRequest, local_tokens: int) -> int:
        """How many tokens behind `local_tokens` would be loaded. Never the prompt's last: that one is computed."""
        remote = self._wanted[request.request_id]
        last = len(request.prompt_token_ids) - 1
        if told.asks_prefill(request.kv_transfer):
            return max(0, last - local_tokens)
        tokens = min(remote.tokens or 0, len(remote.blocks) * self.block_size, last) - local_tokens
        return tokens if tokens >= max(1, self.config.kv_recompute_threshold) else 0

    def skip(self, request_id: str, now_ns: int) -> None:
        """Everything is here already, or not worth a transfer: only tell the other end (pull)."""
        remote = self._wanted.pop(request_id)
        self._heart.stop(request_id)
        if not self.config.pushes:
            self._tell_consumed(remote, request_id)

    def load(self, request: EngineRequest, blocks: Sequence[int], first: int, tokens: int, now_ns: int) -> Load:
        """Blocks are allocated: fetch what stands in them from place `first` on, up to `tokens` tokens."""
        remote = self._wanted.pop(request.request_id)
        places = range(first, self._blocks_for(tokens))
        size_bytes = len(places) * self.block_bytes
        load = Load(next(self.numbers), request.request_id, remote, blocks, places, tokens, size_bytes)
        self.loads[load.number] = load
        return load

    def start(self, load: Load, now_ns: int) -> list[Outcome]:
        """Ask for the move (pull) or say where to write (push)."""
        remote = load.remote
        if self.config.pushes:
            mine = Peer(
                self.config.engine_id, self.config.side_channel_host, self.config.side_channel_port, self.config.tp_size
            )
            ask: Ask = Notify(remote.peer, Registration(load.request_id, remote.request_id, mine, load.moving))
        else:
            if self._expired(remote, now_ns):
                self.counters["nixl_num_kv_expired_reqs"] += 1
                return self._failed_load(load, "the decode's blocks have expired", None)
            if len(remote.blocks) < load.stop:
                return self._failed_load(load, f"{len(remote.blocks)} remote blocks where {load.stop} are needed", None)
            theirs = remote.blocks[load.first : load.stop]
            ask = StartRead(load.number, load.request_id, remote.peer, remote.request_id, load.moving, theirs, load.size_bytes)
        load.asked_ns = now_ns
        if not self.peers.ask(remote.peer, ask):
            return self._failed_load(load, "too much waits for the handshake", None)
        return []

    def _expired(self, remote: Remote, now_ns: int) -> bool:
        return remote.expiry_ns is not None and now_ns + self.config.expiry_margin_ns >= remote.expiry_ns

    def finishing(
        self, request: EngineRequest, reason: FinishReason, blocks: list[int], tokens: int, cached_tokens: int, now_ns: int
    ) -> Kept | None:
        params = request.kv_transfer
        prefill = told.asks_decode(params)
        if not params or reason not in _KEEPS or not blocks or not (prefill or self.config.bidirectional_kv_xfer):
            return None
        ttl_ns = self.config.hold_ns if prefill else self.config.decoder_kv_blocks_ttl_ns
        hold = Hold(request.request_id, blocks, tokens, now_ns + ttl_ns, renewable=prefill and self.config.beat_ns is not None)
        hold.prompt = request.prompt_token_ids
        self.holds.add(hold)
        if not prefill:
            return Kept(told.answer_of_decode(self.config, request.request_id, blocks, tokens, hold.deadline_ns))
        registration = self._registrations.pop(base_id(request.request_id), None)
        if registration is not None:
            self._write(hold, registration, now_ns)
        return Kept(told.answer_of_prefill(self.config, request.request_id, blocks, tokens, cached_tokens))

    def ended(self, request_id: str, now_ns: int) -> None:
        """If it was never scheduled, its prefill learns it here."""
        self._heart.stop(request_id)
        remote = self._wanted.pop(request_id, None)
        if remote is not None and not self.config.pushes:
            self._tell_consumed(remote, request_id)

    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        params = kv_transfer if isinstance(kv_transfer, Mapping) else None
        remote = told.remote_of(params)
        if remote is None or not told.asks_prefill(params) or self.config.pushes or self.config.refusals_tell_nobody:
            return False
        self._tell_consumed(remote, remote.request_id)
        return True

    # What comes in

    def receive(self, report: Report, now_ns: int) -> list[Outcome]:
        return _REPORTS[type(report)](self, report, now_ns)

    def _handshake_done(self, report: HandshakeDone, now_ns: int) -> list[Outcome]:
        reason = self.peers.answered(report)
        return [] if reason is None else self._handshake_failed(HandshakeFailed(report.peer, reason), now_ns)

    def _handshake_failed(self, report: HandshakeFailed, now_ns: int) -> list[Outcome]:
        waiting = self.peers.given_up(report.peer)
        if waiting is None:
            return []
        self.counters["nixl_num_failed_transfers"] += 1
        self.warn(f"NIXL transfer failure: handshake_failed with {shown(report.peer.engine_id)}: {shown(report.reason)}")
        outcomes: list[Outcome] = []
        for ask in waiting:
            if isinstance(ask, StartRead):
                outcomes += self._failed_load(self.loads[ask.number], report.reason, None, counted=True)
            elif isinstance(ask, StartWrite):
                self._write_ended(ask.number)
            elif isinstance(ask, Notify):
                outcomes += self._never_said(ask.notification, report.reason)
        return outcomes

    def _never_said(self, notification: Notification, reason: str) -> list[Outcome]:
        """Nothing that waited for a failed handshake has reached anybody: a registration's load is over."""
        load = self._load_of(notification.request_id) if isinstance(notification, Registration) else None
        if load is not None:
            return self._failed_load(load, reason, None, counted=True)
        self._count_unsaid(notification)
        return []

    def _move_done(self, report: MoveDone, now_ns: int) -> list[Outcome]:
        if report.number in self._writes:
            return self._written(report.number, now_ns)
        load = self.loads.pop(report.number, None)
        if load is None:
            return []
        self.observe(load.size_bytes, len(load.moving) * self.config.descriptors_per_block, now_ns - (load.asked_ns or 0))
        self._tell_consumed(load.remote, load.request_id)
        return self._arrived_load(load, report.foreign)

    def _arrived_load(self, load: Load, foreign: Sequence[int]) -> list[Outcome]:
        self._heart.stop(load.request_id)
        return super()._arrived_load(load, foreign)

    def _move_failed(self, report: MoveFailed, now_ns: int) -> list[Outcome]:
        if report.number in self._writes:
            self.counters["nixl_num_failed_transfers"] += 1
            self._write_ended(report.number)
            return []
        load = self.loads.get(report.number)
        return [] if load is None else self._failed_load(load, report.reason, report.failed)

    def _failed_load(self, load: Load, reason: str, failed: Sequence[int] | None, *, counted: bool = False) -> list[Outcome]:
        """Nobody is told: the other end's lease runs out."""
        del self.loads[load.number]
        self._heart.stop(load.request_id)
        self.counters["nixl_num_failed_transfers"] += not counted
        return self._lost_load(load, reason, failed)

    def _notify_failed(self, report: NotifyFailed, now_ns: int) -> list[Outcome]:
        """The peer's agent is kept: only a new engine id brings a new handshake (vLLM reference §9.4, entry 43).

        The load of a registration that failed goes on waiting, for it may have arrived all the same.
        """
        self._count_unsaid(report.notification)
        return []

    def _count_unsaid(self, notification: Notification) -> None:
        """A heartbeat that fails is a debug line in vLLM; other words count."""
        if not isinstance(notification, Heartbeat):
            self.counters["nixl_num_failed_notifications"] += 1
            self.counters["nixl_num_failed_transfers"] += 1

    def _notified(self, report: Arrived, now_ns: int) -> list[Outcome]:
        match report.notification:
            case Consumed(request_id, consumers):
                return self._consumed(request_id, consumers)
            case Heartbeat(request_ids):
                if not self.config.ignore_heartbeats:
                    self.holds.extend(request_ids, now_ns + self.config.extension_ns)
            case Registration() as registration:
                self._register(registration, now_ns)
            case Pushed(request_id):
                return self._pushed(request_id)
        return []

    def _consumed(self, request_id: str, consumers: int) -> list[Outcome]:
        """On the wire a finished push says the same to the decode, with the decode's id."""
        hold = self.holds.get(request_id)
        if hold is None and self.config.pushes and self._load_of(request_id) is not None:
            return self._pushed(request_id)
        if hold is None:
            self.counters["nixl_num_notifications_after_expiry"] += 1
            self.warn(
                f"Potentially invalid KV blocks for unrecognized request {shown(request_id)} were retrieved by a decode "
                "worker. They may have expired."
            )
            return []
        done = self.holds.consumed(request_id, consumers)
        return [] if done is None else [Freed(request_id, done.blocks)]

    # Push: the prefill writes

    def _register(self, registration: Registration, now_ns: int) -> None:
        hold = self.holds.get(registration.remote_request_id or "")
        wanted = base_id(registration.remote_request_id or registration.request_id)
        hold = hold or next((one for one in self.holds.all() if base_id(one.request_id) == wanted), None)
        if hold is not None:
            self._write(hold, registration, now_ns)
            return
        if len(self._registrations) >= MAX_REGISTRATIONS:
            del self._registrations[next(iter(self._registrations))]
        self._registrations[wanted] = registration

    def _write(self, hold: Hold, registration: Registration, now_ns: int) -> None:
        """The decode has registered its last so many blocks of the prompt without the last token."""
        stop = self._blocks_for(hold.tokens - 1)
        count = min(len(registration.blocks), stop)
        size_bytes = count * self.block_bytes
        mine = tuple(hold.blocks[stop - count : stop])
        theirs = registration.blocks[len(registration.blocks) - count :]
        ask = StartWrite(
            next(self.numbers), hold.request_id, registration.decode, registration.request_id, mine, theirs, size_bytes
        )
        if self.peers.ask(registration.decode, ask):
            hold.moving += 1
            self._writes[ask.number] = (hold, ask, now_ns)
        else:
            self.counters["nixl_num_failed_transfers"] += 1

    def _write_ended(self, number: int) -> tuple[Hold, StartWrite, int]:
        write = self._writes.pop(number)
        self.holds.settled(write[0])
        return write

    def _written(self, number: int, now_ns: int) -> list[Outcome]:
        hold, ask, asked_ns = self._write_ended(number)
        self.observe(ask.size_bytes, len(ask.local_blocks) * self.config.descriptors_per_block, now_ns - asked_ns)
        self._say(ask.peer, Pushed(ask.remote_request_id))
        if hold.moving or self.holds.get(hold.request_id) is not hold:
            return []
        return [Freed(hold.request_id, self.holds.take(hold.request_id).blocks)]

    def _pushed(self, request_id: str) -> list[Outcome]:
        load = self._load_of(request_id)
        if load is None:
            return []
        del self.loads[load.number]
        return self._arrived_load(load, ())

    # Time

    def next_event_at(self) -> int | None:
        return min((at for at in (self.holds.next_at(), self._heart.next_at()) if at is not None), default=None)

    def run(self, now_ns: int) -> list[Outcome]:
        """Everything that is due: leases that are over, heartbeats."""
        beat_at_ns = self._heart.next_at()
        if beat_at_ns is not None and beat_at_ns <= now_ns:
            for notice in self._heart.beat(now_ns):
                if self.peers.ready(notice.peer):
                    self.peers.ask(notice.peer, notice)
                else:
                    self.peers.shake(notice.peer)
        expired = self.holds.expire(now_ns)
        self.counters["nixl_num_kv_expired_reqs"] += len(expired)
        return [Freed(hold.request_id, hold.blocks) for hold in expired]

    def clear(self) -> list[Outcome]:
        for book in (self._writes, self._registrations, self._wanted):
            book.clear()
        self._heart.clear()
        return super().clear()

    # Saying and counting

    def _tell_consumed(self, remote: Remote, own_id: str) -> None:
        """One word for each of our ranks that reads from the same rank over there."""
        request_id = own_id if self.config.notify_own_id else remote.request_id
        consumers = max(1, self.config.tp_size // remote.peer.tp_size)
        for _ in range(consumers):
            self._say(remote.peer, Consumed(request_id, consumers))

    def _say(self, peer: Peer, notification: Notification) -> None:
        if not self.peers.ask(peer, Notify(peer, notification)):
            self._count_unsaid(notification)

    # Looking in

    @property
    def waiting_to_start(self) -> int:
        return len(self._wanted)


def base_id(request_id: str) -> str:
    """An engine's id without its random suffix: what the two legs of one request share (push mode)."""
    base, _, suffix = request_id.rpartition("-")
    return base if base and len(suffix) == 8 else request_id


_REPORTS: Mapping[type, Callable[[NixlConnector, Any, int], list[Outcome]]] = {
    HandshakeDone: NixlConnector._handshake_done,
    HandshakeFailed: NixlConnector._handshake_failed,
    MoveDone: NixlConnector._move_done,
    MoveFailed: NixlConnector._move_failed,
    NotifyFailed: NixlConnector._notify_failed,
    Arrived: NixlConnector._notified,
}
