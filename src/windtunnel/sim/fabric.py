"""The wires between prefill and decode workers: frames, bootstrap servers, heartbeats, lost peers, and faults of all these.

* A frame takes the network's delay and keeps its order on the way from one rank to another. A KV write is not a frame: the
  transport has timed it already, and it lands at once.
* A process has ports of its own. What is sent to an earlier process finds nobody.
* The bootstrap server lives in the prefill process. A decode worker visits the health of the prefills it knows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.disagg.topology import Topology
from windtunnel.core.transfer.backends import OK, Fate, Write
from windtunnel.core.transfer.frames import (
    DpRankQuery,
    Frame,
    KvChunk,
    LateWrite,
    Metadata,
    Outgoing,
    Query,
    RegisterDpRank,
    TopologyQuery,
)
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.network import Network
from windtunnel.sim.replica import Replica
from windtunnel.sim.scenario import EnginesSpec, FaultSpec
from windtunnel.sim.worker_metrics import WorkerMetrics

BOOTSTRAP_PORT = 8998
FIRST_PORT, PORTS = 20_000, 40_000
FRAME_BYTES, PAGE_BYTES = 128, 4
KEPT_LATE_WRITES = 1000


class _Socket(NamedTuple):
    engine: int
    rank: int
    start: int
    """The how manieth process of its engine."""


class Fabric:
    """Owns addresses and everything on its way between workers."""

    def __init__(self, kernel: Kernel, network: Network, specs: Sequence[EnginesSpec], until_ns: int) -> None:
        """`until_ns`: when requests stop coming; an idle decode worker visits nobody afterwards."""
        self.replicas: Sequence[Replica] = ()
        """In index order; filled by whoever builds the cluster."""
        self.faults: list[dict[str, FaultSpec]] = [{} for _ in specs]
        """What is wrong with the wires of each engine, by kind of fault."""
        self.counts: Counter[str] = Counter()
        self.late_writes: list[LateWrite] = []
        self._kernel, self._network, self._specs, self._until_ns = kernel, network, specs, until_ns
        self._chance: Random = kernel.stream("fabric")
        self._metrics = [WorkerMetrics() for _ in specs]
        self._starts = [0] * len(specs)
        self._sockets: dict[str, _Socket] = {}
        self._mourned = [False] * len(specs)
        self._hearts: set[int] = set()
        self._channels: dict[tuple[int, int, str], int] = {}
        """When the latest frame from (engine, rank) to a peer arrives."""

    # Addresses

    def host(self, index: int) -> str:
        return f"10.0.{index >> 8}.{index & 255}"

    def start(self, index: int) -> tuple[str, ...]:
        """A new process of this engine: the sockets of its ranks."""
        self._sockets = {name: socket for name, socket in self._sockets.items() if socket.engine != index}
        self._channels = {key: at for key, at in self._channels.items() if key[0] != index}
        ranks, start = self._specs[index].tp, self._starts[index] + 1
        self._starts[index], self._mourned[index] = start, False
        endpoints = tuple(f"{self.host(index)}:{FIRST_PORT + (start * ranks + rank) % PORTS}" for rank in range(ranks))
        self._sockets |= {endpoint: _Socket(index, rank, start) for rank, endpoint in enumerate(endpoints)}
        return endpoints

    def endpoints(self, index: int) -> tuple[str, ...]:
        return tuple(name for name, socket in self._sockets.items() if socket.engine == index)

    def _alive(self, endpoint: str) -> bool:
        socket = self._sockets.get(endpoint)
        return socket is not None and self.replicas[socket.engine].up

    # KV writes

    def fate_of(self, index: int) -> Callable[[Write], Fate]:
        """What becomes of the writes of this engine."""
        return partial(self._fate, index)

    def _fate(self, index: int, write: Write) -> Fate:
        if not self._alive(write.peer):
            return Fate("lost")
        for name, kind in (("stall_writes", "stall"), ("fail_writes", "fail")):
            if self._strikes(index, name):
                self.counts[name] += 1
                return Fate(kind)
        return OK

    def _strikes(self, index: int, kind: str) -> bool:
        fault = self.faults[index].get(kind)
        return fault is not None and self._chance.random() < fault.share

    # Frames

    def on_turn(self, replica: Replica) -> None:
        """Something has happened at this engine: send what it has to say."""
        engine = replica.engine
        if not replica.up:
            self._mourn(replica.index)
            return
        if isinstance(engine, PrefillWorker | DecodeWorker):
            for outgoing in engine.take_outgoing():
                replica.deliver(partial(self._send, replica.index, outgoing))
            self._metrics[replica.index].fold(engine, replica.metrics)
        if isinstance(engine, DecodeWorker):
            self._count_late_writes(engine.take_late_writes())
            self._keep_visiting(replica)

    def _count_late_writes(self, writes: Sequence[LateWrite]) -> None:
        self.counts["late_writes"] += len(writes)
        self.late_writes += writes[: KEPT_LATE_WRITES - len(self.late_writes)]

    def _send(self, index: int, outgoing: Outgoing) -> None:
        frame = outgoing.frame
        if isinstance(frame, TopologyQuery | DpRankQuery | RegisterDpRank):
            self._ask(index, frame)
        elif isinstance(frame, KvChunk):
            self.counts["writes_landed"] += 1
            self._arrive(outgoing.to, frame)
        elif self._strikes(index, "lose_frames"):
            self.counts["frames_lost"] += 1
        else:
            self._post(index, outgoing, frame)

    def _post(self, index: int, outgoing: Outgoing, frame: Frame) -> None:
        self.counts["frames"] += 1
        at_ns = self._kernel.now_ns + self._network.engine_engine_ns(_size_bytes(frame))
        if self._strikes(index, "late_frames"):
            self.counts["frames_late"] += 1
            at_ns += self.faults[index]["late_frames"].late
        channel = (index, outgoing.rank, outgoing.to)
        at_ns = self._channels[channel] = max(at_ns, self._channels.get(channel, 0))
        self._kernel.at(at_ns, partial(self._arrive, outgoing.to, frame))

    def _arrive(self, endpoint: str, frame: Frame) -> None:
        socket = self._sockets.get(endpoint)
        if socket is None:
            self.counts["frames_to_nobody"] += 1
        else:
            self.replicas[socket.engine].deliver(partial(self._receive, socket, frame))

    def _receive(self, socket: _Socket, frame: Frame) -> None:
        replica = self.replicas[socket.engine]
        engine = replica.engine
        if not replica.up or socket.start != self._starts[socket.engine]:
            self.counts["frames_to_nobody"] += 1
        elif isinstance(engine, PrefillWorker | DecodeWorker):
            engine.receive(frame, self._kernel.now_ns, socket.rank)
            replica.wake()

    # Bootstrap servers

    def _ask(self, index: int, query: Query) -> None:
        """Only topologies are asked for: with one data-parallel rank there is nothing else to know."""
        assert isinstance(query, TopologyQuery | RegisterDpRank), "a question about ranks where there is one"
        if isinstance(query, TopologyQuery):
            answer = partial(self._answer, index, self._starts[index], query.address)
            self._kernel.after(self._network.engine_engine_ns(FRAME_BYTES), answer)

    def _answer(self, asker: int, start: int, address: str) -> None:
        server = self._server(address)
        if not server.up:
            self._reply(asker, start, address, None)
            return
        server.deliver(partial(self._look_up, asker, start, address))

    def _look_up(self, asker: int, start: int, address: str) -> None:
        server = self._server(address)
        endpoints = {(0, rank): endpoint for rank, endpoint in enumerate(self.endpoints(server.index))}
        self._reply(asker, start, address, Topology(len(endpoints), 1, endpoints) if server.up else None)

    def _reply(self, asker: int, start: int, address: str, answer: Topology | None) -> None:
        replica = self.replicas[asker]
        arrive = partial(self._learn, asker, start, address, answer)
        self._kernel.after(self._network.engine_engine_ns(FRAME_BYTES), partial(replica.deliver, arrive))

    def _learn(self, asker: int, start: int, address: str, answer: Topology | None) -> None:
        replica = self.replicas[asker]
        engine = replica.engine
        if replica.up and start == self._starts[asker] and isinstance(engine, DecodeWorker):
            engine.topology(address, answer, self._kernel.now_ns)
            replica.wake()

    def _server(self, address: str) -> Replica:
        host = address.rpartition(":")[0]
        return next(replica for replica in self.replicas if self.host(replica.index) == host)

    # Health

    def _keep_visiting(self, replica: Replica) -> None:
        """One visit ahead, as long as somebody may need its outcome."""
        engine, index = replica.engine, replica.index
        wanted = self._kernel.now_ns < self._until_ns or bool(engine.live())
        if index not in self._hearts and wanted and isinstance(engine, DecodeWorker) and engine.prefills.addresses:
            self._hearts.add(index)
            self._kernel.after(engine.disagg.heartbeat_interval_ns, partial(self._visit, index, self._starts[index]))

    def _visit(self, index: int, start: int) -> None:
        self._hearts.discard(index)
        replica = self.replicas[index]
        engine = replica.engine
        if not replica.up or start != self._starts[index] or not isinstance(engine, DecodeWorker):
            return
        for address in engine.prefills.addresses:
            lost = engine.heartbeat(address, self._kernel.now_ns, alive=replica.reachable and self._healthy(address))
            self.counts["prefills_lost"] += lost
        replica.wake()

    def _healthy(self, address: str) -> bool:
        server = self._server(address)
        return server.up and server.reachable and isinstance(server.engine, PrefillWorker) and server.engine.dead is None

    def _mourn(self, index: int) -> None:
        """A process is gone: the transports of its peers will notice in their own time."""
        if self._mourned[index]:
            return
        self._mourned[index] = True
        for replica in self.replicas:
            if replica.up and isinstance(replica.engine, PrefillWorker):
                for endpoint in self.endpoints(index):
                    replica.engine.lose_peer(endpoint, self._kernel.now_ns)
                replica.wake()


def _size_bytes(frame: Frame) -> int:
    return FRAME_BYTES + PAGE_BYTES * (len(frame.pages) if isinstance(frame, Metadata) else 0)
