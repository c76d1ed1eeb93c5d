"""Engines with KV connectors and the wires between them, in memory and in virtual time."""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any

from tests.core.rig import EOS, STEP_NS, expected, request

from windtunnel.core.outputs import EngineError, FinishReason, StepOutput, StepStats
from windtunnel.core.pacing import Pacing, StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.transfer.backends import Fate, SimBackend, always_ok
from windtunnel.core.units import MS
from windtunnel.core.vllm import VllmEngineConfig
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.mover import BlockMover, Move
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    Ask,
    AskHandshake,
    HandshakeDone,
    HandshakeFailed,
    Notification,
    Notify,
    NotifyFailed,
    Peer,
    Pulled,
    Pulls,
    Report,
    StartWrite,
)
from windtunnel.wire.vllm import mooncake
from windtunnel.wire.vllm.nixl import decode, encode

LATENCY_NS = 500
READ_NS = 20_000
LIMIT = 200_000
NULLS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router gives to the prefill leg."""


class Node:
    """One engine, its moves and what it has said."""

    def __init__(
        self,
        name: str,
        port: int,
        pacing: Pacing,
        config: Mapping[str, Any],
        kv: Mapping[str, Any],
        engine_type: type[ConnectorEngine] = ConnectorEngine,
    ) -> None:
        told = {"compatibility_hash": "same", "kv_bytes_per_token": 1, **kv}
        self.name = name
        self.address = f"{name}:{port}"
        self.engine = engine_type(
            VllmEngineConfig(**{"num_blocks": 65, "max_model_len": 1024, "eos_token_id": EOS, **config}),
            pacing,
            KvTransferConfig(**{"engine_id": f"engine-{name}", "side_channel_host": name, "side_channel_port": port, **told}),
        )
        self.backend = SimBackend(bandwidth_gb_s=1e9, latency_ns=READ_NS)
        self.mover = BlockMover(self.backend)
        self.up = True
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, EngineError] = {}
        self.params: dict[str, Mapping[str, Any] | None] = {}
        self.stats: StepStats | None = None
        self.steps: list[StepOutput] = []

    def fold(self, step: StepOutput) -> None:
        self.steps.append(step)
        self.stats = step.stats or self.stats
        for output in step.outputs:
            assert output.request_id not in self.finish, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                self.errors[output.request_id] = output.error
            if output.finish_reason is not None:
                self.finish[output.request_id] = output.finish_reason
                self.params[output.request_id] = output.kv_transfer

    @property
    def used_blocks(self) -> int:
        pool = self.engine._scheduler.pool
        return pool.usable_blocks - pool.free_blocks

    @property
    def counters(self) -> Mapping[str, int]:
        return self.engine.connector.counters


class World:
    """Owns the nodes and everything under way between them."""

    def __init__(self, *nodes: Node) -> None:
        self.now_ns = 0
        self.nodes = {node.address: node for node in nodes}
        self.said: list[tuple[str, Notification]] = []
        """(sender, notification), as they were sent."""
        self.asked: list[tuple[str, Ask]] = []
        self.drop: Callable[[Notification], bool] = lambda _notification: False
        self.delay_ns: Callable[[Ask], int] = lambda _ask: LATENCY_NS
        self._mail: list[tuple[int, int, Callable[[], None]]] = []
        self._places = count()

    def submit(self, node: Node, *requests: EngineRequest) -> Any:
        refusal = node.engine.submit(requests, self.now_ns)
        self.pump(node)
        return refusal

    def abort(self, node: Node, *request_ids: str) -> int:
        live = node.engine.abort(request_ids, self.now_ns)
        self.pump(node)
        return live

    def pump(self, node: Node) -> None:
        for ask in node.engine.take_outgoing():
            self.asked.append((node.name, ask))
            self._perform(node, ask)

    def _perform(self, node: Node, ask: Ask) -> None:
        if isinstance(ask, AskHandshake):
            self._post(2 * self.delay_ns(ask), lambda: self._shake(node, ask.peer))
        elif isinstance(ask, Notify):
            self.said.append((node.name, ask.notification))
            if not self.drop(ask.notification):
                self._post(self.delay_ns(ask), lambda: self._arrive(node, ask))
        else:
            node.mover.start(ask, self.now_ns)

    def _post(self, delay_ns: int, what: Callable[[], None]) -> None:
        heappush(self._mail, (self.now_ns + delay_ns, next(self._places), what))

    def _find(self, peer: Peer) -> Node | None:
        node = self.nodes.get(f"{peer.host}:{peer.port}")
        return node if node is not None and node.up else None

    def _shake(self, node: Node, peer: Peer) -> None:
        other = self._find(peer)
        report: Report = HandshakeFailed(peer, "nobody is there")
        if other is not None:
            report = HandshakeDone(peer, other.engine.handshake)
        self.tell(node, report)

    def _arrive(self, node: Node, ask: Notify) -> None:
        other = self._find(ask.peer)
        if other is None:
            self.tell(node, NotifyFailed(ask.peer, ask.notification, "nobody is there"))
        else:
            self.tell(other, Arrived(carried(ask.notification)))

    def tell(self, node: Node, report: Report) -> None:
        if node.up:
            node.engine.receive(report, self.now_ns)
            node.engine.check_integrity()
            self.pump(node)

    def _overwritten(self, move: Move) -> tuple[int, ...]:
        if isinstance(move, StartWrite):
            return ()
        other = self._find(move.peer)
        return () if other is None else other.engine.overwritten(move.remote_request_id, move.remote_blocks)

    # Time

    def next_at(self) -> int | None:
        times = [self._mail[0][0]] if self._mail else []
        for node in self.nodes.values():
            if node.up:
                times += [at for at in (node.engine.next_event_at(), node.mover.next_event_at()) if at is not None]
        return max(self.now_ns, min(times)) if times else None

    def event(self) -> None:
        """Go to the next event and run everything of that instant."""
        at_ns = self.next_at()
        assert at_ns is not None, "the world is at rest"
        self.now_ns = at_ns
        while self._mail and self._mail[0][0] <= at_ns:
            heappop(self._mail)[2]()
        for node in self.nodes.values():
            if node.up:
                self._turn(node)

    def _turn(self, node: Node) -> None:
        for report in node.mover.run(self.now_ns, self._overwritten):
            self.tell(node, report)
        for step in node.engine.advance(self.now_ns):
            node.fold(step)
        node.engine.check_integrity()
        self.pump(node)

    def run(self, until: Callable[[], bool] = lambda: False, limit_ns: int | None = None) -> None:
        """Until that holds, or the time is over, or nothing is due any more."""
        for _ in range(LIMIT):
            at_ns = self.next_at()
            if until() or at_ns is None or (limit_ns is not None and at_ns > limit_ns):
                break
            self.event()
        else:
            raise AssertionError("the world does not come to rest")
        if limit_ns is not None and not until():
            self.now_ns = max(self.now_ns, limit_ns)


class Pair(World):
    """A prefill and a decode, and the router's part."""

    def __init__(
        self,
        *,
        kv: Mapping[str, Any] | None = None,
        prefill_kv: Mapping[str, Any] | None = None,
        decode_kv: Mapping[str, Any] | None = None,
        pacing: Callable[[], Pacing] = lambda: StepPacing(STEP_NS, 0, 0),
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        fate: Callable[[Any], Fate] = always_ok,
        engine_type: type[ConnectorEngine] = ConnectorEngine,
    ) -> None:
        lease = {"lease_ns": 30 * MS, **(kv or {})}
        self.p = Node("p", 5600, pacing(), prefill or {}, {**lease, **(prefill_kv or {})}, engine_type)
        self.d = Node("d", 5700, pacing(), decode or {}, {**lease, **(decode_kv or {})}, engine_type)
        self.p.backend.fate = self.d.backend.fate = fate
        super().__init__(self.p, self.d)

    def prefill(self, name: str, prompt: int = 100, **more: Any) -> Mapping[str, Any] | None:
        """Run the prefill leg of a request to its end; what the router hands on."""
        self.submit(self.p, prefill_leg(name, prompt, **more))
        self.run(lambda: f"{name}-p" in self.p.finish)
        return self.p.params.get(f"{name}-p")

    def decode(self, name: str, params: Mapping[str, Any] | None, prompt: int = 100, max_tokens: int = 8, **more: Any) -> Any:
        return self.submit(self.d, decode_leg(name, params, prompt, max_tokens, **more))

    def both(self, name: str, prompt: int = 100, max_tokens: int = 8) -> None:
        self.decode(name, self.prefill(name, prompt), prompt, max_tokens)
        self.run(lambda: f"{name}-d" in self.d.finish)

    def consumed(self) -> list[Notification]:
        return [notification for _sender, notification in self.said if type(notification).__name__ == "Consumed"]

    def rest(self) -> None:
        """Run until nothing is due, and see that nobody holds anything."""
        self.run()
        for node in self.nodes.values():
            assert node.used_blocks == 0, f"{node.name} holds {node.used_blocks} blocks"
            assert not any(node.engine.outstanding().values())


def carried(notification: Notification) -> Notification:
    """Over the wire and back."""
    if isinstance(notification, Pulls):
        return mooncake.decode_pulls(mooncake.encode_pulls(notification))
    if isinstance(notification, Pulled):
        (answer,) = mooncake.decode_answers(mooncake.encode_answer(notification)).pulled
        return answer
    return decode(encode(notification))


def prefill_leg(name: str, prompt: int = 100, **more: Any) -> EngineRequest:
    tokens = request(name, prompt).prompt_token_ids
    source = request(name).source
    return request(f"{name}-p", tokens, **{"max_tokens": 1, "source": source, "kv_transfer": NULLS, **more})


def decode_leg(
    name: str, params: Mapping[str, Any] | None, prompt: int = 100, max_tokens: int = 8, **more: Any
) -> EngineRequest:
    tokens = request(name, prompt).prompt_token_ids
    return request(f"{name}-d", tokens, max_tokens, source=request(name).source, kv_transfer=params, **more)


def answer(name: str, max_tokens: int = 8) -> list[int]:
    """What a single server would say."""
    return expected(name, max_tokens)
