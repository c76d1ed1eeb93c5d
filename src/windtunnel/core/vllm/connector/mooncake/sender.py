"""The prefill's side: what it holds under which transfer's id, whose pulls wait here, and what is written to whom."""

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.vllm.connector import params as told
from windtunnel.core.vllm.connector.base import Connector, Kept
from windtunnel.core.vllm.connector.holds import Hold
from windtunnel.core.vllm.connector.loads import Freed, Outcome
from windtunnel.core.vllm.connector.mooncake.pulls import digest_of
from windtunnel.core.vllm.connector.peers import ranks_mismatch
from windtunnel.core.vllm.connector.seam import Notify, Peer, Pull, Pulled, Pulls, StartWrite

FAILED_TRANSFERS = "mooncake_num_failed_transfers"
EXPIRED = "mooncake_num_kv_expired_reqs"
MAX_QUEUED, MAX_QUEUED_BYTES = 4096, 64 * 1024 * 1024
"""`Pulls` that wait for a place, and what they take together; a further one is refused. vLLM's queue has no end."""
NOT_READY = "Timeout waiting for P side ready."
TOO_FEW = "P num blocks less than D"


class _Batch:
    """A `Pulls` that has a place. Owned by its sender."""

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


class _Transfer:
    """What a transfer's id stands for, vLLM's `SendBlockMeta`. Owned by its sender."""

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


class Sender:
    """Owned by a `MooncakeConnector`, whose holds, counts and peers it works on."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._config = connector.config
        self._holds = connector.holds
        self._sending: dict[str, str] = {}
        """Requests that are to be sent when they end, and their transfer ids."""
        self._transfers: dict[str, _Transfer] = {}
        self._held_as: dict[str, str] = {}
        """Request id of each hold → its transfer's id."""
        self._batches: list[_Batch] = []
        self._queue: deque[Pulls] = deque()
        self._queued_bytes = 0
        self._writes: dict[int, _Write] = {}
        self._done: list[Hold] = []
        """Holds that somebody has pulled; those that a write still needs are among them."""
        self.stranded: list[Hold] = []

    # This engine's own requests

    def expect(self, request: EngineRequest) -> None:
        transfer_id = told.transfer_of(request.kv_transfer)
        if transfer_id is None:
            self._connector.warn("Missing transfer_id in kv_transfer_params from router!")
            return
        self._sending[request.request_id] = transfer_id
        self._transfers.setdefault(transfer_id, _Transfer()).expected = True

    def finishing(
        self, request: EngineRequest, reason: FinishReason, blocks: list[int], tokens: int, now_ns: int
    ) -> Kept | None:
        """See `Connector.finishing`."""
        if reason is not FinishReason.LENGTH or not blocks or request.request_id not in self._sending:
            return None
        transfer_id = self._sending.pop(request.request_id)
        hold = Hold(request.request_id, blocks, tokens, now_ns + self._config.hold_ns, renewable=False)
        hold.prompt = request.prompt_token_ids
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self.stranded.append(hold)
            return Kept(None)
        if transfer.hold is not None:
            self._strand(transfer.hold)
        transfer.hold = hold
        self._holds.add(hold)
        self._held_as[hold.request_id] = transfer_id
        self._serve(transfer_id, transfer, now_ns)
        return Kept(None)

    def ended(self, request_id: str) -> None:
        """One that is not held is forgotten, and so is what waits for it."""
        transfer = self._transfers.pop(self._sending.pop(request_id, ""), None)
        if transfer is not None and transfer.hold is not None:
            self._strand(transfer.hold)

    def _strand(self, hold: Hold) -> None:
        self.stranded.append(self._holds.take(hold.request_id))
        del self._held_as[hold.request_id]

    # Pulls of others

    def admit(self, pulls: Pulls, now_ns: int) -> None:
        if len(self._batches) < self._places:
            self._begin(pulls, now_ns)
        elif len(self._queue) < MAX_QUEUED and self._queued_bytes + pulls.size_bytes <= MAX_QUEUED_BYTES:
            self._queue.append(pulls)
            self._queued_bytes += pulls.size_bytes
        else:
            self._refuse(pulls, "too many pulls wait here")

    def _refuse(self, pulls: Pulls, reason: str) -> None:
        for at, pull in enumerate(pulls.pulls, 1):
            self._say(pulls.decode, Pulled(pull.request_id, reason, last=at == len(pulls.pulls)))

    def _mismatch(self, pulls: Pulls) -> str | None:
        """Why nothing of ours fits there; None if it does."""
        mine, theirs = self._connector.block_bytes, pulls.block_bytes
        if mine != theirs:
            return f"Mooncake KV region length mismatch: local={mine}, remote={theirs}."
        return ranks_mismatch(self._config.tp_size, pulls.decode.tp_size)

    @property
    def _places(self) -> int:
        return 2 * self._config.num_workers

    def _begin(self, pulls: Pulls, now_ns: int) -> None:
        if (reason := self._mismatch(pulls)) is not None:
            self._refuse(pulls, reason)
            return
        batch = _Batch(pulls.decode, now_ns + self._config.hold_ns)
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

    def _answer(self, batch: _Batch, answer: Pulled, now_ns: int) -> None:
        batch.deadline_ns = now_ns + self._config.hold_ns
        self._say(batch.decode, answer._replace(last=not batch.open))
        if not batch.open:
            self._batches.remove(batch)

    def _say(self, decode: Peer, answer: Pulled) -> None:
        self._connector.peers.outgoing.append(Notify(decode, answer))

    # Writes

    def _ask_write(self, batch: _Batch, pull: Pull, hold: Hold) -> StartWrite:
        number = next(self._connector.numbers)
        mine = tuple(hold.blocks[-len(pull.blocks) :])
        size_bytes = len(mine) * self._connector.block_bytes
        return StartWrite(number, hold.request_id, batch.decode, pull.request_id, mine, pull.blocks, size_bytes)

    def _write(self, write: _Write) -> None:
        write.hold.moving += 1
        write.batch.moving += 1
        self._writes[write.ask.number] = write
        self._connector.peers.outgoing.append(write.ask)

    def _report(self, transfer_id: str, transfer: _Transfer) -> None:
        """Somebody has what is held: the id is free at once, the blocks are when no write needs them any more."""
        if self._transfers.get(transfer_id) is transfer and transfer.hold is not None:
            del self._transfers[transfer_id]
            self._done.append(transfer.hold)

    def write_ended(self, number: int, reason: str | None, now_ns: int) -> list[Outcome]:
        """Well, or for that reason not."""
        write = self._writes.pop(number, None)
        if write is None:
            return []
        write.batch.moving -= 1
        self._holds.settled(write.hold)
        if reason is None:
            self._connector.observe(write.ask.size_bytes, self.descriptors(write.ask), now_ns - write.since_ns)
            self._report(write.transfer_id, write.transfer)
        else:
            self._connector.counters[FAILED_TRANSFERS] += 1
        self._answer(write.batch, Pulled(write.ask.remote_request_id, reason, digest_of(write.hold.prompt)), now_ns)
        return self.sweep(now_ns)

    def descriptors(self, ask: StartWrite) -> int:
        """Runs of blocks that are contiguous on both sides, for each layer."""
        pairs = list(zip(ask.local_blocks, ask.remote_blocks, strict=True))
        breaks = sum(after != (before[0] + 1, before[1] + 1) for before, after in pairwise(pairs))
        return (breaks + 1) * self._config.descriptors_per_block

    # Time

    def next_at(self) -> int | None:
        if any(not hold.moving for hold in self._done) or (self._queue and len(self._batches) < self._places):
            return 0
        times = [self._holds.next_at(), *(batch.deadline_ns for batch in self._batches if not batch.moving)]
        return min((at for at in times if at is not None), default=None)

    def run(self, now_ns: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for batch in [one for one in self._batches if one.deadline_ns <= now_ns and not one.moving]:
            self._impatient(batch)
        for hold in self._holds.expire(now_ns):
            self._connector.counters[EXPIRED] += 1
            del self._transfers[self._held_as.pop(hold.request_id)]
            outcomes.append(Freed(hold.request_id, hold.blocks))
        return outcomes + self.sweep(now_ns)

    def sweep(self, now_ns: int) -> list[Outcome]:
        """Places that have become free go to those in the queue, and blocks that were only to be let go are free."""
        while self._queue and len(self._batches) < self._places:
            pulls = self._queue.popleft()
            self._queued_bytes -= pulls.size_bytes
            self._begin(pulls, now_ns)
        done = [hold for hold in self._done if not hold.moving]
        self._done = [hold for hold in self._done if hold.moving]
        for hold in done:
            del self._held_as[hold.request_id]
        return [Freed(hold.request_id, self._holds.take(hold.request_id).blocks) for hold in done]

    def _impatient(self, batch: _Batch) -> None:
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
        if not (transfer.expected or transfer.waiting or transfer.hold):
            del self._transfers[transfer_id]

    def clear(self) -> list[Outcome]:
        """The engine has died. What was stranded is free; the holds are the connector's to free."""
        freed: list[Outcome] = [Freed(hold.request_id, hold.blocks) for hold in self.stranded]
        for book in (
            self._sending,
            self._transfers,
            self._held_as,
            self._batches,
            self._queue,
            self._writes,
            self.stranded,
            self._done,
        ):
            book.clear()
        self._queued_bytes = 0
        return freed

    # Looking in

    @property
    def open_pulls(self) -> int:
        """Pulls of others that wait here or are written."""
        return sum(batch.open for batch in self._batches) + sum(len(pulls.pulls) for pulls in self._queue)
