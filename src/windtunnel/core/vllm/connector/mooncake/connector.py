"""The connector of both roles: a decode's loads, and for everything else which side it is for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector import params as told
from windtunnel.core.vllm.connector.base import Connector, Kept
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.loads import Load, Outcome
from windtunnel.core.vllm.connector.mooncake.pulls import PullBook, digest_of
from windtunnel.core.vllm.connector.mooncake.sender import EXPIRED, FAILED_TRANSFERS, Sender
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
    Pull,
    Pulled,
    Pulls,
    Report,
)

FAILED_RECVS = "mooncake_num_failed_recvs"


class MooncakeConnector(Connector):
    """Owned by one engine. All times are the engine's."""

    series = "mooncake"
    counted = (FAILED_TRANSFERS, FAILED_RECVS, EXPIRED)

    def __init__(self, config: KvTransferConfig, pool: BlockPool, *, block_size: int, num_blocks: int) -> None:
        super().__init__(config, pool, block_size=block_size, num_blocks=num_blocks)
        self.sender = Sender(self)
        self.pulls = PullBook(config, self.peers, self.block_bytes)
        self._wanted: dict[str, Remote] = {}

    # The life of a request

    def arrived(self, request: EngineRequest, now_ns: int) -> None:
        params = request.kv_transfer
        if told.asks_prefill(params):
            self._wanted[request.request_id] = told.mooncake_remote_of(params) or NOWHERE
        elif told.asks_decode(params):
            self.sender.expect(request)

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
        places = range(first, self._blocks_for(tokens))
        size_bytes = len(places) * self.block_bytes
        load = Load(next(self.numbers), request.request_id, remote, blocks, places, tokens - 1, size_bytes)
        load.again = 1
        load.digest = digest_of(request.prompt_token_ids)
        self.loads[load.number] = load
        return load

    def start(self, load: Load, now_ns: int) -> list[Outcome]:
        load.asked_ns = now_ns
        if load.remote is NOWHERE:
            self.warn(f"Got invalid KVTransferParams of {shown(load.request_id)}. This request will not utilize KVTransfer")
        else:
            self.pulls.add(load.remote.peer, Pull(load.request_id, load.remote.request_id, load.moving), now_ns)
        return []

    def take_outgoing(self) -> list[Ask]:
        self.pulls.send()
        return super().take_outgoing()

    def finishing(
        self, request: EngineRequest, reason: FinishReason, blocks: list[int], tokens: int, cached_tokens: int, now_ns: int
    ) -> Kept | None:
        return self.sender.finishing(request, reason, blocks, tokens, now_ns)

    def ended(self, request_id: str, now_ns: int) -> None:
        """A decode's request that was never scheduled lets go of the prefill's; a prefill's that is not held is forgotten."""
        remote = self._wanted.pop(request_id, None)
        if remote is not None and remote is not NOWHERE:
            self.pulls.add(remote.peer, Pull(request_id, remote.request_id, ()), now_ns)
        self.sender.ended(request_id)

    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        params = kv_transfer if isinstance(kv_transfer, Mapping) else None
        remote = told.mooncake_remote_of(params)
        if remote is None or not told.asks_prefill(params) or self.config.refusals_tell_nobody:
            return False
        self.pulls.add(remote.peer, Pull(f"refused-{next(self.numbers)}", remote.request_id, ()), now_ns)
        return True

    # What comes in

    def receive(self, report: Report, now_ns: int) -> list[Outcome]:
        return _REPORTS[type(report)](self, report, now_ns)

    def _found(self, report: HandshakeDone, now_ns: int) -> list[Outcome]:
        """The bootstrap server knows the engine."""
        reason = self.peers.answered(report)
        return [] if reason is None else self._not_found(HandshakeFailed(report.peer, reason), now_ns)

    def _not_found(self, report: HandshakeFailed, now_ns: int) -> list[Outcome]:
        """Asked again for the next request."""
        outcomes: list[Outcome] = []
        for ask in self.peers.given_up(report.peer) or ():
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
                self.sender.admit(pulls, now_ns)
            case Pulled() as answer:
                return self._end_pull(answer, now_ns)
        return self.sender.sweep(now_ns)

    def _move_done(self, report: MoveDone, now_ns: int) -> list[Outcome]:
        return self.sender.write_ended(report.number, None, now_ns)

    def _move_failed(self, report: MoveFailed, now_ns: int) -> list[Outcome]:
        return self.sender.write_ended(report.number, f"Mooncake transfer engine: {report.reason}", now_ns)

    def _end_pull(self, answer: Pulled, now_ns: int) -> list[Outcome]:
        if not self.pulls.end(answer.request_id, now_ns):
            return []
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
        return min((at for at in (self.sender.next_at(), self.pulls.next_at()) if at is not None), default=None)

    def run(self, now_ns: int) -> list[Outcome]:
        outcomes = self.sender.sweep(now_ns)
        for request_id in self.pulls.take_due(now_ns):
            outcomes += self._end_pull(Pulled(request_id, "no answer"), now_ns)
        return outcomes + self.sender.run(now_ns)

    def clear(self) -> list[Outcome]:
        self._wanted.clear()
        self.pulls.clear()
        return self.sender.clear() + super().clear()

    # Looking in

    @property
    def waiting_to_start(self) -> int:
        return len(self._wanted)

    def outstanding(self) -> dict[str, int]:
        """`stranded` holds stay for good; `pulls` of others wait here or are written."""
        return {**super().outstanding(), "stranded": len(self.sender.stranded), "pulls": self.sender.open_pulls}

    def owners(self) -> Iterator[tuple[str, Sequence[int]]]:
        yield from super().owners()
        for hold in self.sender.stranded:
            yield f"stranded {hold.request_id}", hold.blocks


_REPORTS: Mapping[type, Callable[[MooncakeConnector, Any, int], list[Outcome]]] = {
    HandshakeDone: MooncakeConnector._found,
    HandshakeFailed: MooncakeConnector._not_found,
    MoveDone: MooncakeConnector._move_done,
    MoveFailed: MooncakeConnector._move_failed,
    NotifyFailed: MooncakeConnector._not_said,
    Arrived: MooncakeConnector._notified,
}
