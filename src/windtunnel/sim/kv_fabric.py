"""The wires between vLLM engines with KV connectors: side channels, notifications, moves of blocks, and faults of all these.

* A process keeps its address over a restart and gets another engine id: what was meant for the earlier one fails.
* A notification takes the network's delay and keeps its order. A move is the backend's; it is not a message.
* A question for a server that nothing reaches waits until it is reached again.
* Mooncake: a bootstrap server lives as long as its process. A pull that nobody takes is not heard of again (a DEALER socket
  connects in silence); any other word that nobody takes has failed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeGuard

from windtunnel.core.engine import Engine
from windtunnel.core.transfer.backends import OK, Fate, SimBackend, Write
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.mover import BlockMover, Move
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    Ask,
    AskHandshake,
    HandshakeDone,
    HandshakeFailed,
    MoveDone,
    Notify,
    NotifyFailed,
    Peer,
    Pulls,
    Report,
    StartRead,
)
from windtunnel.sim.fabric import BOOTSTRAP_PORT
from windtunnel.sim.kernel import Kernel, Timer
from windtunnel.sim.network import Network
from windtunnel.sim.replica import Replica
from windtunnel.sim.scenario import EnginesSpec, FaultSpec
from windtunnel.wire.vllm.metrics import VllmMetrics

SIDE_CHANNEL_PORT = 5600
FRAME_BYTES = 128
_GONE = "the process has gone"


class _Process:
    """One process of one engine: its identity and its moves. Owned by the fabric."""

    __slots__ = ("alarm", "backend", "engine_id", "mover")

    def __init__(self, engine_id: str, backend: SimBackend) -> None:
        self.engine_id = engine_id
        self.backend = backend
        self.mover = BlockMover(backend)
        self.alarm: Timer | None = None


class KvFabric:
    """Owns addresses and everything on its way between engines."""

    def __init__(self, kernel: Kernel, network: Network, specs: Sequence[EnginesSpec]) -> None:
        self.replicas: Sequence[Replica] = ()
        """In index order; filled by whoever builds the cluster."""
        self.faults: list[dict[str, FaultSpec]] = [{} for _ in specs]
        """What is wrong with the wires of each engine, by kind of fault."""
        self.counts: Counter[str] = Counter()
        self._kernel, self._network, self._specs = kernel, network, specs
        self._chance: Random = kernel.stream("fabric")
        self._starts = [0] * len(specs)
        self._processes: dict[int, _Process] = {}
        self._channels: dict[tuple[int, str], int] = {}
        """When the latest notification from an engine to an engine id arrives."""
        self._moving: Move | None = None
        """What is being posted."""

    # Addresses

    def host(self, index: int) -> str:
        return f"10.0.{index >> 8}.{index & 255}"

    def start(self, index: int) -> tuple[str, ...]:
        """A new process of this engine: its side channel and its engine id."""
        self._starts[index] += 1
        engine_id = f"engine-{index}-{self._starts[index]}"
        transfer = self._specs[index].transfer
        backend = SimBackend(
            bandwidth_gb_s=transfer.bandwidth_gb_s,
            latency_ns=transfer.latency,
            dead_peer_ns=transfer.dead_peer,
            fate=self.fate_of(index),
        )
        self._processes[index] = _Process(engine_id, backend)
        address = f"{self.host(index)}:{SIDE_CHANNEL_PORT}"
        for process in self._processes.values():
            process.backend.find_peer(address)
        return address, engine_id

    def _index_of(self, peer: Peer) -> int | None:
        known = (at for at in range(len(self._specs)) if self.host(at) == peer.host)
        return next(known, None) if peer.port in (SIDE_CHANNEL_PORT, BOOTSTRAP_PORT) else None

    def engine_id(self, index: int) -> str:
        """Of the process that is there, or was last."""
        return self._processes[index].engine_id

    def _engine_of(self, peer: Peer) -> ConnectorEngine | None:
        """The engine that is meant, if that very process lives."""
        index = self._index_of(peer)
        if index is None or not self.replicas[index].up or self._processes[index].engine_id != peer.engine_id:
            return None
        engine = self.replicas[index].engine
        return engine if isinstance(engine, ConnectorEngine) else None

    # Turns

    def on_turn(self, replica: Replica) -> None:
        """Something has happened at this engine: carry out what it asks for."""
        index, engine = replica.index, replica.engine
        if not replica.up:
            self._mourn(index)
        elif _connected(engine):
            for ask in engine.take_outgoing():
                self._perform(index, ask)
            observations = engine.take_observations()
            if isinstance(replica.metrics, VllmMetrics):
                replica.metrics.on_transfers(0, observations)
            self._await_moves(index)

    def _perform(self, index: int, ask: Ask) -> None:
        process = self._processes[index]
        if isinstance(ask, AskHandshake):
            self.counts["handshakes"] += 1
            self._kernel.after(self._network.engine_engine_ns(FRAME_BYTES), partial(self._ask, index, process, ask.peer))
        elif isinstance(ask, Notify):
            self.replicas[index].deliver(partial(self._notify, index, process, ask))
        else:
            self._moving = ask
            process.mover.start(ask, self._kernel.now_ns)
            self._moving = None

    def _tell(self, index: int, process: _Process, report: Report) -> None:
        """Give a report to the process that it is for, if that one lives."""
        replica = self.replicas[index]
        engine = replica.engine
        if replica.up and self._processes[index] is process and isinstance(engine, ConnectorEngine):
            engine.receive(report, self._kernel.now_ns)
            replica.wake()

    def _tell_later(self, index: int, process: _Process, report: Report) -> None:
        tell = partial(self.replicas[index].deliver, partial(self._tell, index, process, report))
        self._kernel.after(self._network.engine_engine_ns(FRAME_BYTES), tell)

    # Side channels

    def _ask(self, index: int, process: _Process, peer: Peer) -> None:
        server = self._index_of(peer)
        if server is None or not self.replicas[server].up:
            self._tell_later(index, process, HandshakeFailed(peer, "nobody answers at the side channel"))
        else:
            self.replicas[server].deliver(partial(self._answer, index, process, peer, server))

    def _answer(self, index: int, process: _Process, peer: Peer, server: int) -> None:
        engine = self.replicas[server].engine
        if self.replicas[server].up and isinstance(engine, ConnectorEngine):
            self._tell_later(index, process, HandshakeDone(peer, engine.handshake))
        else:
            self._tell_later(index, process, HandshakeFailed(peer, _GONE))

    # Notifications

    def _notify(self, index: int, process: _Process, ask: Notify) -> None:
        kind = type(ask.notification).__name__.lower()
        self.counts[f"{kind}_sent"] += 1
        if self._strikes(index, "lose_frames"):
            self.counts["frames_lost"] += 1
            return
        at_ns = self._kernel.now_ns + self._network.engine_engine_ns(FRAME_BYTES)
        if self._strikes(index, "late_frames"):
            self.counts["frames_late"] += 1
            at_ns += self.faults[index]["late_frames"].late
        channel = (index, ask.peer.engine_id)
        at_ns = self._channels[channel] = max(at_ns, self._channels.get(channel, 0))
        self._kernel.at(at_ns, partial(self._arrive, index, process, ask))

    def _arrive(self, index: int, process: _Process, ask: Notify) -> None:
        server = self._index_of(ask.peer)
        if server is None or self._engine_of(ask.peer) is None:
            self.counts["frames_to_nobody"] += 1
            if not isinstance(ask.notification, Pulls):
                self._tell(index, process, NotifyFailed(ask.peer, ask.notification, _GONE))
        else:
            target = self._processes[server]
            self.replicas[server].deliver(partial(self._tell, server, target, Arrived(ask.notification)))

    def _strikes(self, index: int, kind: str) -> bool:
        fault = self.faults[index].get(kind)
        return fault is not None and self._chance.random() < fault.share

    # Moves

    def fate_of(self, index: int) -> Callable[[Write], Fate]:
        """What becomes of the moves that this engine posts."""
        return partial(self._fate, index)

    def _fate(self, index: int, _write: Write) -> Fate:
        """A fault of a prefill's writes strikes whatever leaves it, whoever posts it."""
        move = self._moving
        assert move is not None, "a write that nobody asked for"
        if self._engine_of(move.peer) is None:
            return Fate("lost")
        source = self._index_of(move.peer) if isinstance(move, StartRead) else index
        for name, kind in (("stall_writes", "stall"), ("fail_writes", "fail")):
            if source is not None and self._strikes(source, name):
                self.counts[name] += 1
                return Fate(kind)
        return OK

    def _await_moves(self, index: int) -> None:
        process = self._processes[index]
        at_ns = process.mover.next_event_at()
        if process.alarm is not None and process.alarm.action is not None:
            if process.alarm.at_ns == at_ns:
                return
            process.alarm.cancel()
        process.alarm = None if at_ns is None else self._kernel.at(at_ns, partial(self._moved, index, process))

    def _moved(self, index: int, process: _Process) -> None:
        process.alarm = None
        for report in process.mover.run(self._kernel.now_ns, self._overwritten):
            self.counts["moves_done" if isinstance(report, MoveDone) else "moves_failed"] += 1
            self.counts["foreign_reads"] += isinstance(report, MoveDone) and bool(report.foreign)
            self._tell(index, process, report)
        if self._processes[index] is process:
            self._await_moves(index)

    def _overwritten(self, move: Move) -> Sequence[int]:
        engine = self._engine_of(move.peer) if isinstance(move, StartRead) else None
        return () if engine is None else engine.overwritten(move.remote_request_id, move.remote_blocks)

    def _mourn(self, index: int) -> None:
        """A process is gone: its own moves end nowhere, and the transports of its peers notice in their own time."""
        process = self._processes[index]
        if process.alarm is not None:
            process.alarm.cancel()
            process.alarm = None
        for other, peer_process in self._processes.items():
            if other != index and self.replicas[other].up:
                peer_process.backend.lose_peer(f"{self.host(index)}:{SIDE_CHANNEL_PORT}", self._kernel.now_ns)
                self._await_moves(other)


def _connected(engine: Engine) -> TypeGuard[ConnectorEngine]:
    return isinstance(engine, ConnectorEngine)
