"""The Mooncake connector: what is held, what is pulled, who is answered.

Checked against the source of vLLM 0.33.0 (`kv_connector/v1/mooncake/mooncake_connector.py`, read 2026-11-30; not run: it needs
GPUs). What it does there and here:

* The router makes up a `transfer_id` for both legs, which come at once or one after the other. A prefill answers no parameters.
* A decode allocates, and asks the prefill (`Pulls`) to write into its blocks. The prefill writes when its own request has ended
  by length, and answers; whichever comes first waits for the other.
* A prefill request that ends otherwise (a stop string, an abort) is forgotten. Nobody tells the decode: it waits until the
  prefill's patience is over (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, 480 s), as does one that asks after the blocks have gone.
* A prefill serves `2 * num_workers` pulls at a time, those included that wait. Further ones stand in a queue behind them.
* Blocks are held by their transfer's id. A second request with the same id (`n` above 1, several prompts) takes the first one's
  place, and nobody can free the first one's blocks any more: they are *stranded*.
* A decode whose parameters are incomplete waits for ever: it counts the prompt as loaded elsewhere before it looks at them.
* A request that is for the other role trips an assertion, and the engine dies.

Each pull is a write of its own here; vLLM makes one call of all that are ready in one `Pulls`.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice, pairwise, takewhile
from typing import Any, NamedTuple

from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector import params as told
from windtunnel.core.vllm.connector.base import Connector, Kept
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.holds import Hold
from windtunnel.core.vllm.connector.loads import Freed, Load, Outcome
from windtunnel.core.vllm.connector.params import NOWHERE, Remote
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    Ask,
    HandshakeDone,
    HandshakeFailed,
    MoveDone,
    MoveFailed,
    Notify,
    NotifyFailed,
    Peer,
    Pull,
    Pulled,
    Pulls,
    Report,
    StartWrite,
)

FAILED_TRANSFERS = "mooncake_num_failed_transfers"
FAILED_RECVS = "mooncake_num_failed_recvs"
EXPIRED = "mooncake_num_kv_expired_reqs"
MAX_QUEUED = 4096
"""`Pulls` that wait for a place; a further one is answered with an error. vLLM's queue has no end."""
NOT_READY = "Timeout waiting for P side ready."
TOO_FEW = "P num blocks less than D"


class _Batch:
    """A `Pulls` that has a place. Owned by its connector."""

    __slots__ = ("deadline_ns", "decode", "moving", "waiting")

    def __init__(self, decode: Peer, deadline_ns: int) -> None:
        self.decode = decode
        self.deadline_ns = deadline_ns
        """Starts again with every answer."""
        self.waiting: dict[str, Pull] = {}
        """By the decode's request id."""
        self.moving = 0

    @property
    def open(self) -> int:
        return len(self.waiting) + self.moving


class _Asked:
    """What one `Pulls` of ours has asked for. Owned by its connector."""

    __slots__ = ("deadline_ns", "peer", "pulls")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.deadline_ns = 0
        """Starts again with every answer."""
        self.pulls: dict[str, Pull] = {}
        """Those without an answer yet, by our request id."""


class _Transfer:
    """What a transfer's id stands for on the prefill, vLLM's `SendBlockMeta`. Owned by its connector."""

    __slots__ = ("expected", "hold", "waiting")

    def __init__(self) -> None:
        self.expected = False
        """A request of this engine has had this id."""
        self.hold: Hold | None = None
        self.waiting: list[tuple[_Batch, Pull]] = []


class _Write(NamedTuple):
    transfer_id: str
    transfer: _Transfer
    hold: Hold
    batch: _Batch
    ask: StartWrite
    since_ns: int


class MooncakeConnector(Connector):
    """Owned by one engine. All times are the engine's."""

    series = "mooncake"
    counted = (FAILED_TRANSFERS, FAILED_RECVS, EXPIRED)

    def __init__(self, config: KvTransferConfig, pool: BlockPool, *, block_size: int, num_blocks: int) -> None:
        super().__init__(config, pool, block_size=block_size, num_blocks=num_blocks)
        # As a decode.
        self._wanted: dict[str, Remote] = {}
        self._unsent: dict[str, _Asked] = {}
        """Pulls of this turn, by engine id."""
        self._pulling: dict[str, _Asked] = {}
        """By our request id."""
        self._asked: dict[int, _Asked] = {}
        """What has no answer yet, by identity, in the order of deadlines."""
        self._unheard: list[str] = []
        """Pulls that have failed on our side."""
        # As a prefill.
        self._sending: dict[str, str] = {}
        """Requests that are to be sent when they end, and their transfer ids."""
        self._transfers: dict[str, _Transfer] = {}
        self._held_as: dict[str, str] = {}
        """Request id of each hold → its transfer's id."""
        self._batches: list[_Batch] = []
        self._queue: deque[Pulls] = deque()
        self._writes: dict[int, _Write] = {}
        self._stranded: list[Hold] = []
        self._done: list[Hold] = []
        """Holds that somebody has pulled; those that a write still needs are among them."""

    # A decode's request

    def arrived(self, request: EngineRequest, now_ns: int) -> None:
        params = request.kv_transfer
        if told.asks_prefill(params):
            self._wanted[request.request_id] = told.mooncake_remote_of(params) or NOWHERE
        elif told.asks_decode(params):
            self._expect(request)

    def wants(self, request_id: str) -> bool:
        return request_id in self._wanted

    def forbids(self, request: EngineRequest) -> bool:
        if told.asks_prefill(request.kv_transfer):
            return self.config.role == "kv_producer" and request.request_id in self._wanted
        return self.config.role == "kv_consumer" and told.asks_decode(request.kv_transfer)

    def external_tokens(self, request: EngineRequest, local_tokens: int) -> int:
        """The whole prompt: what the cache has never reaches its last token."""
        return len(request.prompt_token_ids) - local_tokens

    def skip(self, request_id: str, now_ns: int) -> None:
        """Something is always left to load."""
        raise AssertionError(f"{request_id} was scheduled without its load")

    def load(self, request: EngineRequest, blocks: Sequence[int], first: int, tokens: int, now_ns: int) -> Load:
        remote = self._wanted.pop(request.request_id)
        self._numbers += 1
        places = range(first, self._blocks_for(tokens))
        size_bytes = len(places) * self.block_size * self.config.kv_bytes_per_token
        load = Load(self._numbers, request.request_id, remote, blocks, places, tokens - 1, size_bytes)
        load.again = 1
        load.digest = digest_of(request.prompt_token_ids)
        self.loads[load.number] = load
        return load

    def start(self, load: Load, now_ns: int) -> list[Outcome]:
        load.asked_ns = now_ns
        if load.remote is NOWHERE:
            self.warn(f"Got invalid KVTransferParams of {shown(load.request_id)}. This request will not utilize KVTransfer")
        elif not told.is_text(load.request_id, told.ID_LIMIT_BYTES):
            del self.loads[load.number]
            return self._lost_load(load, f"a pull's request id has at most {told.ID_LIMIT_BYTES} bytes of UTF-8", None)
        else:
            self._pull(load.remote, Pull(load.request_id, load.remote.request_id, load.moving), now_ns)
        return []

    def _pull(self, remote: Remote, pull: Pull, now_ns: int) -> None:
        asked = self._unsent.setdefault(remote.peer.engine_id, _Asked(remote.peer))
        asked.pulls[pull.request_id] = pull
        self._pulling[pull.request_id] = asked
        self._be_patient(asked, now_ns)

    def _be_patient(self, asked: _Asked, now_ns: int) -> None:
        asked.deadline_ns = now_ns + self.config.hold_ns + self.config.pull_margin_ns
        self._asked.pop(id(asked), None)
        if asked.pulls:
            self._asked[id(asked)] = asked

    def take_outgoing(self) -> list[Ask]:
        unsent, self._unsent = self._unsent, {}
        mine = Peer(self.config.engine_id, self.config.side_channel_host, self.config.side_channel_port, self.config.tp_size)
        for asked in unsent.values():
            pulls = tuple(asked.pulls.values())
            if not self._peers.ask(asked.peer, Notify(asked.peer, Pulls(mine, pulls))):
                self._unheard += [pull.request_id for pull in pulls]
        return super().take_outgoing()

    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        params = kv_transfer if isinstance(kv_transfer, Mapping) else None
        remote = told.mooncake_remote_of(params)
        if remote is None or not told.asks_prefill(params) or self.config.refusals_tell_nobody:
            return False
        self._let_go("", remote, now_ns)
        return True

    def _let_go(self, request_id: str, remote: Remote, now_ns: int) -> None:
        """A pull of no blocks. Its name is one of ours where the request has none, or one that cannot be sent."""
        self._numbers += 1
        name = request_id if told.is_text(request_id, told.ID_LIMIT_BYTES) else f"gone-{self._numbers}"
        self._pull(remote, Pull(name, remote.request_id, ()), now_ns)

    # A prefill's request

    def _expect(self, request: EngineRequest) -> None:
        transfer_id = told.transfer_of(request.kv_transfer)
        if transfer_id is None:
            self.warn("Missing transfer_id in kv_transfer_params from router!")
            return
        self._sending[request.request_id] = transfer_id
        self._transfers.setdefault(transfer_id, _Transfer()).expected = True

    def finishing(
        self, request: EngineRequest, reason: FinishReason, blocks: list[int], tokens: int, cached_tokens: int, now_ns: int
    ) -> Kept | None:
        if reason is not FinishReason.LENGTH or not blocks or request.request_id not in self._sending:
            return None
        transfer_id = self._sending.pop(request.request_id)
        hold = Hold(request.request_id, blocks, tokens, now_ns + self.config.hold_ns, renewable=False)
        hold.prompt = request.prompt_token_ids
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._stranded.append(hold)
            return Kept(None)
        if transfer.hold is not None:
            self._strand(transfer.hold)
        transfer.hold = hold
        self.holds.add(hold)
        self._held_as[hold.request_id] = transfer_id
        self._serve(transfer_id, transfer, now_ns)
        return Kept(None)

    def ended(self, request_id: str, now_ns: int) -> None:
        """A decode's request that was never scheduled lets go of the prefill's; a prefill's that is not held is forgotten."""
        remote = self._wanted.pop(request_id, None)
        if remote is not None and remote is not NOWHERE:
            self._let_go(request_id, remote, now_ns)
        transfer = self._transfers.pop(self._sending.pop(request_id, ""), None)
        if transfer is not None and transfer.hold is not None:
            self._strand(transfer.hold)

    def _strand(self, hold: Hold) -> None:
        self._stranded.append(self.holds.take(hold.request_id))
        del self._held_as[hold.request_id]

    # Pulls of others

    def _admit(self, pulls: Pulls, now_ns: int) -> None:
        if len(self._batches) < 2 * self.config.num_workers:
            self._begin(pulls, now_ns)
        elif len(self._queue) < MAX_QUEUED:
            self._queue.append(pulls)
        else:
            for at, pull in enumerate(pulls.pulls, 1):
                self._say(pulls.decode, Pulled(pull.request_id, "too many pulls wait here", last=at == len(pulls.pulls)))

    def _begin(self, pulls: Pulls, now_ns: int) -> None:
        batch = _Batch(pulls.decode, now_ns + self.config.hold_ns)
        batch.waiting = {pull.request_id: pull for pull in pulls.pulls}
        if not batch.open:
            return
        self._batches.append(batch)
        for pull in batch.waiting.values():
            self._transfers.setdefault(pull.transfer_id, _Transfer()).waiting.append((batch, pull))
        for transfer_id in dict.fromkeys(pull.transfer_id for pull in pulls.pulls):
            self._serve(transfer_id, self._transfers[transfer_id], now_ns)

    def _serve(self, transfer_id: str, transfer: _Transfer, now_ns: int) -> None:
        """Write for everybody who waits, if there is something to write."""
        hold = transfer.hold
        if hold is None:
            return
        waiting, transfer.waiting = transfer.waiting, []
        for batch, pull in waiting:
            del batch.waiting[pull.request_id]
            if len(pull.blocks) > len(hold.blocks):
                self._answer(batch, Pulled(pull.request_id, TOO_FEW), now_ns)
            elif pull.blocks:
                self._write(_Write(transfer_id, transfer, hold, batch, self._ask_write(batch, pull, hold), now_ns))
            else:
                self._report(transfer_id, transfer)
                self._answer(batch, Pulled(pull.request_id, None, digest_of(hold.prompt)), now_ns)

    def _ask_write(self, batch: _Batch, pull: Pull, hold: Hold) -> StartWrite:
        self._numbers += 1
        mine = tuple(hold.blocks[-len(pull.blocks) :])
        size_bytes = len(mine) * self.block_size * self.config.kv_bytes_per_token
        return StartWrite(self._numbers, hold.request_id, batch.decode, pull.request_id, mine, pull.blocks, size_bytes)

    def _write(self, write: _Write) -> None:
        write.hold.moving += 1
        write.batch.moving += 1
        self._writes[write.ask.number] = write
        self._peers.outgoing.append(write.ask)

    def _report(self, transfer_id: str, transfer: _Transfer) -> None:
        """Somebody has what is held: the id is free at once, the blocks are when no write needs them any more."""
        if self._transfers.get(transfer_id) is transfer and transfer.hold is not None:
            del self._transfers[transfer_id]
            self._done.append(transfer.hold)

    def _write_ended(self, number: int, reason: str | None, now_ns: int) -> list[Outcome]:
        write = self._writes.pop(number, None)
        if write is None:
            return []
        write.batch.moving -= 1
        self.holds.settled(write.hold)
        if reason is None:
            self._observe(write.ask.size_bytes, self._descriptors(write.ask), now_ns - write.since_ns)
            self._report(write.transfer_id, write.transfer)
        else:
            self.counters[FAILED_TRANSFERS] += 1
        self._answer(write.batch, Pulled(write.ask.remote_request_id, reason, digest_of(write.hold.prompt)), now_ns)
        return self._sweep(now_ns)

    def _descriptors(self, ask: StartWrite) -> int:
        """Runs of blocks that are contiguous on both sides, for each layer."""
        pairs = list(zip(ask.local_blocks, ask.remote_blocks, strict=True))
        breaks = sum(after != (before[0] + 1, before[1] + 1) for before, after in pairwise(pairs))
        return (breaks + 1) * self.config.descriptors_per_block

    def _answer(self, batch: _Batch, answer: Pulled, now_ns: int) -> None:
        batch.deadline_ns = now_ns + self.config.hold_ns
        self._say(batch.decode, answer._replace(last=not batch.open))
        if not batch.open:
            self._batches.remove(batch)

    def _say(self, decode: Peer, answer: Pulled) -> None:
        self._peers.outgoing.append(Notify(decode, answer))

    def _impatient(self, batch: _Batch, now_ns: int) -> None:
        """Nothing has become ready for too long: all that wait are told so. Nothing of this waits when something moves."""
        waiting, batch.waiting = batch.waiting, {}
        for at, pull in enumerate(waiting.values(), 1):
            self._forget_waiting(pull.transfer_id, batch)
            self._say(batch.decode, Pulled(pull.request_id, NOT_READY, last=at == len(waiting) and not batch.moving))
        if not batch.open:
            self._batches.remove(batch)

    def _forget_waiting(self, transfer_id: str, batch: _Batch) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        transfer.waiting = [one for one in transfer.waiting if one[0] is not batch]
        if not (transfer.expected or transfer.waiting):
            del self._transfers[transfer_id]

    # What comes in

    def receive(self, report: Report, now_ns: int) -> list[Outcome]:
        return _REPORTS[type(report)](self, report, now_ns)

    def _found(self, report: HandshakeDone, now_ns: int) -> list[Outcome]:
        """The bootstrap server knows the engine."""
        reason = self._peers.answered(report)
        return [] if reason is None else self._not_found(HandshakeFailed(report.peer, reason), now_ns)

    def _not_found(self, report: HandshakeFailed, now_ns: int) -> list[Outcome]:
        """Asked again for the next request."""
        outcomes: list[Outcome] = []
        for ask in self._peers.given_up(report.peer) or ():
            if isinstance(ask, Notify) and isinstance(ask.notification, Pulls):
                outcomes += self._unpulled(ask.notification, report.reason, now_ns)
        return outcomes

    def _not_said(self, report: NotifyFailed, now_ns: int) -> list[Outcome]:
        """An answer that cannot be given is lost: the decode's patience ends on its own."""
        notification = report.notification
        return self._unpulled(notification, report.reason, now_ns) if isinstance(notification, Pulls) else []

    def _unpulled(self, pulls: Pulls, reason: str, now_ns: int) -> list[Outcome]:
        return [outcome for pull in pulls.pulls for outcome in self._end_pull(Pulled(pull.request_id, reason), now_ns)]

    def _notified(self, report: Arrived, now_ns: int) -> list[Outcome]:
        match report.notification:
            case Pulls() as pulls if self.config.role != "kv_consumer":
                self._admit(pulls, now_ns)
            case Pulled() as answer:
                return self._end_pull(answer, now_ns)
        return self._sweep(now_ns)

    def _move_done(self, report: MoveDone, now_ns: int) -> list[Outcome]:
        return self._write_ended(report.number, None, now_ns)

    def _move_failed(self, report: MoveFailed, now_ns: int) -> list[Outcome]:
        return self._write_ended(report.number, f"Mooncake transfer engine: {report.reason}", now_ns)

    def _sweep(self, now_ns: int) -> list[Outcome]:
        """Places that have become free go to those in the queue, and blocks that were only to be let go are free."""
        while self._queue and len(self._batches) < 2 * self.config.num_workers:
            self._begin(self._queue.popleft(), now_ns)
        done = [hold for hold in self._done if not hold.moving]
        self._done = [hold for hold in self._done if hold.moving]
        for hold in done:
            del self._held_as[hold.request_id]
        return [Freed(hold.request_id, self.holds.take(hold.request_id).blocks) for hold in done]

    def _end_pull(self, answer: Pulled, now_ns: int) -> list[Outcome]:
        asked = self._pulling.pop(answer.request_id, None)
        if asked is None:
            return []
        del asked.pulls[answer.request_id]
        self._be_patient(asked, now_ns)
        load = self._load_of(answer.request_id)
        if answer.reason is not None:
            self.counters[FAILED_RECVS] += 1
            self.warn(f"pulling kv_caches for {shown(answer.request_id)} failed: {shown(answer.reason)}")
        if load is None:
            return []
        del self.loads[load.number]
        if answer.reason is not None:
            return self._lost_load(load, answer.reason, None)
        return self._arrived_load(load, () if answer.digest == load.digest else range(len(load.moving)))

    # Time

    def next_event_at(self) -> int | None:
        times = [self.holds.next_at(), *(batch.deadline_ns for batch in self._batches if not batch.moving)]
        times += [asked.deadline_ns for asked in islice(self._asked.values(), 1)]
        if self._unheard or any(not hold.moving for hold in self._done):
            times.append(0)
        return min((at for at in times if at is not None), default=None)

    def run(self, now_ns: int) -> list[Outcome]:
        outcomes = self._sweep(now_ns)
        for request_id in [*self._unheard, *self._overdue(now_ns)]:
            outcomes += self._end_pull(Pulled(request_id, "no answer"), now_ns)
        self._unheard.clear()
        for batch in [one for one in self._batches if one.deadline_ns <= now_ns and not one.moving]:
            self._impatient(batch, now_ns)
        for hold in self.holds.expire(now_ns):
            self.counters[EXPIRED] += 1
            del self._transfers[self._held_as.pop(hold.request_id)]
            outcomes.append(Freed(hold.request_id, hold.blocks))
        return outcomes + self._sweep(now_ns)

    def _overdue(self, now_ns: int) -> list[str]:
        overdue = takewhile(lambda asked: asked.deadline_ns <= now_ns, self._asked.values())
        return [request_id for asked in overdue for request_id in asked.pulls]

    def clear(self) -> list[Outcome]:
        stranded: list[Outcome] = [Freed(hold.request_id, hold.blocks) for hold in self._stranded]
        received = (self._wanted, self._unsent, self._pulling, self._asked, self._unheard)
        sent = (
            self._sending,
            self._transfers,
            self._held_as,
            self._batches,
            self._queue,
            self._writes,
            self._stranded,
            self._done,
        )
        for book in (*received, *sent):
            book.clear()
        return stranded + super().clear()

    # Looking in

    @property
    def waiting_to_start(self) -> int:
        return len(self._wanted)

    def outstanding(self) -> dict[str, int]:
        """`stranded` holds stay for good; `pulls` of others wait here or are written."""
        pulls = sum(batch.open for batch in self._batches) + sum(len(pulls.pulls) for pulls in self._queue)
        return {**super().outstanding(), "stranded": len(self._stranded), "pulls": pulls}

    def owners(self) -> Iterator[tuple[str, Sequence[int]]]:
        yield from super().owners()
        for hold in self._stranded:
            yield f"stranded {hold.request_id}", hold.blocks


def digest_of(prompt: Sequence[int]) -> str:
    """Ours: real blocks say nothing about their prompt."""
    return sha256(array("q", prompt).tobytes()).hexdigest()[:32]


_REPORTS: Mapping[type, Callable[[MooncakeConnector, Any, int], list[Outcome]]] = {
    HandshakeDone: MooncakeConnector._found,
    HandshakeFailed: MooncakeConnector._not_found,
    MoveDone: MooncakeConnector._move_done,
    MoveFailed: MooncakeConnector._move_failed,
    NotifyFailed: MooncakeConnector._not_said,
    Arrived: MooncakeConnector._notified,
}
