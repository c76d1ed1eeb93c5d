"""Everything a P/D worker says and hears: frames over ZMQ, questions over HTTP, heartbeats (SGLang reference §2.2, §4.1).

The worker is sans-IO. After every input the transport wakes its driver; after every turn of the driver `pump` sends what the
worker has to say. Times that a person waits for divide by the time scale; a socket always gets at least `SOCKET_FLOOR_S`.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import zmq.asyncio
from pydantic import ValidationError

from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.disagg.topology import Topology
from windtunnel.core.shown import shown
from windtunnel.core.transfer.backends import SimBackend
from windtunnel.core.transfer.frames import (
    Abort,
    DpRankQuery,
    Frame,
    KvChunk,
    KvStatus,
    Metadata,
    Outgoing,
    RegisterDpRank,
    TopologyQuery,
)
from windtunnel.core.transfer.status import KVPoll
from windtunnel.serve.clock import now_ns
from windtunnel.serve.nixl.agent import Arrival, KvAgent
from windtunnel.serve.nixl.backend import RealBytesBackend
from windtunnel.serve.pd.http_client import HttpAsker, NoAnswer
from windtunnel.serve.pd.sockets import Peers, RankSockets
from windtunnel.wire.real_bytes import decode_map
from windtunnel.wire.real_bytes import encode as encode_real
from windtunnel.wire.sglang.bootstrap import RankAnswer, RouteRegistration, TopologyAnswer
from windtunnel.wire.sglang.frames import FrameError, Registration, decode, encode

log = logging.getLogger("windtunnel.serve")

SOCKET_FLOOR_S = 1.0
QUESTIONS_LIMIT = 256
REGISTERED_LIMIT = 65536
"""Pairs of sockets; beyond, those of prefills that are connected no more are forgotten."""
_REGISTER_TRIES = 5
_STATUS_SEND_S = 30.0
"""Prefill → decode: a constant, best effort (reference §3.3)."""


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Times in nanoseconds as SGLang has them; the transport divides them by `time_scale`."""

    time_scale: float = 1.0
    zmq_send_timeout_ns: int = 1_000_000_000
    heartbeat_interval_ns: int = 5_000_000_000

    def scaled_s(self, ns: int) -> float:
        return ns / 1e9 / self.time_scale

    def socket_s(self, seconds: float) -> float:
        return max(SOCKET_FLOOR_S, seconds / self.time_scale)

    def http(self, connect_s: float = 5.0, read_s: float = 5.0) -> httpx.Timeout:
        return httpx.Timeout(self.socket_s(read_s), connect=self.socket_s(connect_s))


class Transport:
    """Base of both sides. Owned by the event loop's thread; `start` before use, `close` at the end."""

    send_timeout_s: float

    def __init__(
        self,
        sockets: RankSockets,
        config: TransportConfig,
        wake: Callable[[], None],
        kv_agents: Sequence[KvAgent] = (),
    ) -> None:
        """`kv_agents` move real bytes: one for each rank, or none."""
        self.sockets = sockets
        self.config = config
        self.asker = HttpAsker()
        self.kv_agents = kv_agents
        self.agents = [agent.name for agent in kv_agents] or [uuid.uuid4().hex for _ in sockets.sockets]
        self.malformed = 0
        """Messages that could not be read."""
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self.peers: Peers

    @property
    def worker(self) -> PrefillWorker | DecodeWorker:
        raise NotImplementedError

    async def start(self) -> None:
        self.peers = Peers(self.sockets.context, self.send_timeout_s, self.connection)
        for rank, sockets in enumerate(self.sockets.sockets):
            for socket, _port in sockets:
                self.spawn(self._listen(rank, socket))
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.bytes_moved)

        for agent in self.kv_agents:
            agent.wake = wake

    def bytes_moved(self) -> None:
        """An agent has something to take."""
        self._wake()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        await self.asker.close()
        self.sockets.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection(self, endpoint: str, lost: bool) -> None:
        """A connection to a peer has ended, or begun."""

    async def _listen(self, rank: int, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart()
            try:
                message = decode(parts)
                self.heard(rank, message)
            except ValueError as error:
                self.malformed += 1
                log.warning("rank %d: %s", rank, error)
            self._wake()

    def heard(self, rank: int, message: Frame | Registration) -> None:
        raise NotImplementedError

    # Sending

    def pump(self) -> None:
        """Send what the worker has to say."""
        for outgoing in self.worker.take_outgoing():
            try:
                self.perform(outgoing)
            except Exception:
                log.exception("%s to %s", type(outgoing.frame).__name__, shown(outgoing.to))
                self.failed(outgoing)

    def perform(self, outgoing: Outgoing) -> None:
        """What fails here fails alone: `pump` goes on with the next one."""
        frame = outgoing.frame
        if isinstance(frame, TopologyQuery | DpRankQuery | RegisterDpRank):
            self.ask(outgoing)
        else:
            self._send(outgoing, frame)

    def ask(self, outgoing: Outgoing) -> None:
        handler = _QUESTIONS[type(outgoing.frame)]
        if len(self._tasks) < QUESTIONS_LIMIT:
            self.spawn(handler(self, outgoing))
        else:
            log.warning("too many questions are open: %s is not asked", outgoing)

    def _send(self, outgoing: Outgoing, frame: Frame) -> None:
        peer = self.peers.get(outgoing.to)
        if peer is None:
            self.failed(outgoing)
            return
        if isinstance(frame, Metadata | Abort):
            frame = frame._replace(peer=self.sockets.endpoint(outgoing.rank, frame.room))
        peer.send(encode(frame, self.agents[outgoing.rank]), lambda: self.failed(outgoing))

    def failed(self, outgoing: Outgoing) -> None:
        """A frame could not be sent in time."""
        log.warning("%s to %s was not sent in time", type(outgoing.frame).__name__, shown(outgoing.to))

    # Questions (the handlers of `ask`)

    async def ask_topology(self, outgoing: Outgoing) -> None:
        raise NotImplementedError

    async def ask_dp_ranks(self, outgoing: Outgoing) -> None:
        raise NotImplementedError

    async def register_dp_rank(self, outgoing: Outgoing) -> None:
        raise NotImplementedError


_QUESTIONS: Mapping[type, Callable[[Transport, Outgoing], Coroutine[Any, Any, None]]] = MappingProxyType(
    {
        TopologyQuery: lambda transport, outgoing: transport.ask_topology(outgoing),
        DpRankQuery: lambda transport, outgoing: transport.ask_dp_ranks(outgoing),
        RegisterDpRank: lambda transport, outgoing: transport.register_dp_rank(outgoing),
    }
)


class PrefillTransport(Transport):
    """The prefill's side: registers its ranks, hears metadata and aborts, and sees decode processes go."""

    def __init__(
        self,
        worker: PrefillWorker,
        sockets: RankSockets,
        config: TransportConfig,
        wake: Callable[[], None],
        kv_agents: Sequence[KvAgent] = (),
    ) -> None:
        super().__init__(sockets, config, wake, kv_agents)
        self.send_timeout_s = config.socket_s(_STATUS_SEND_S)
        self.bootstrap_url = ""
        self._worker = worker

    @property
    def worker(self) -> PrefillWorker:
        return self._worker

    def heard(self, rank: int, message: Frame | Registration) -> None:
        if isinstance(message, Registration):
            self.peers.get(message.peer)
            self._learn(rank, message)
            return
        self._worker.receive(message, now_ns(), rank)

    def _learn(self, rank: int, told: Registration) -> None:
        backend = self._worker.ranks[rank].backend
        if isinstance(backend, RealBytesBackend) and not told.memory:
            log.warning("the decode behind %s has no real memory: start it with the backend nixl too", told.peer)
        elif isinstance(backend, RealBytesBackend):
            backend.learn(told.peer, told.agent_name, decode_map(told.memory))

    def connection(self, endpoint: str, lost: bool) -> None:
        if lost:
            log.info("the decode behind %s has gone", endpoint)
            self._worker.lose_peer(endpoint, now_ns())
        else:
            for rank in self._worker.ranks:
                if isinstance(rank.backend, SimBackend | RealBytesBackend):
                    rank.backend.find_peer(endpoint)
        self._wake()

    async def register(self, bootstrap_url: str, registrations: list[RouteRegistration]) -> None:
        """Tell the bootstrap server of every rank: five tries with growing pauses. Raises NoAnswer."""
        self.bootstrap_url = bootstrap_url
        for one in registrations:
            for attempt in range(_REGISTER_TRIES):
                try:
                    await self.asker.ask("PUT", f"{self.bootstrap_url}/route", self.config.http(), one.model_dump())
                    break
                except NoAnswer:
                    if attempt == _REGISTER_TRIES - 1:
                        raise
                    await asyncio.sleep(min(30.0, 2.0**attempt) / self.config.time_scale)

    async def register_dp_rank(self, outgoing: Outgoing) -> None:
        frame = outgoing.frame
        assert isinstance(frame, RegisterDpRank)
        body = {"bootstrap_room": frame.room, "dp_rank": frame.dp_rank}
        try:
            await self.asker.ask("POST", f"{self.bootstrap_url}/register_dp_rank", self.config.http(), body)
        except NoAnswer as error:
            log.warning("%s", error)


class DecodeTransport(Transport):
    """The decode's side: looks prefills up, registers with their ranks, sends metadata and aborts, and beats."""

    def __init__(
        self,
        worker: DecodeWorker,
        sockets: RankSockets,
        config: TransportConfig,
        wake: Callable[[], None],
        kv_agents: Sequence[KvAgent] = (),
    ) -> None:
        super().__init__(sockets, config, wake, kv_agents)
        self.send_timeout_s = config.socket_s(config.zmq_send_timeout_ns / 1e9)
        self._worker = worker
        self._registered: set[tuple[int, str, str]] = set()

    @property
    def worker(self) -> DecodeWorker:
        return self._worker

    async def start(self) -> None:
        await super().start()
        self.spawn(self._heartbeats())

    def heard(self, rank: int, message: Frame | Registration) -> None:
        if isinstance(message, Registration):
            raise FrameError("a decode takes no registrations")
        self._take_arrivals()
        self._worker.receive(message, now_ns(), rank)

    def bytes_moved(self) -> None:
        self._take_arrivals()
        self._wake()

    def _take_arrivals(self) -> None:
        """Writes into our memory. Their receipts are out already, so what the prefill says of them must not overtake them."""
        for rank, agent in enumerate(self.kv_agents):
            for arrival in agent.take_arrivals():
                try:
                    self._arrived(rank, arrival)
                except ValueError as error:
                    self.malformed += 1
                    log.warning("rank %d: %s", rank, error)

    def _arrived(self, rank: int, arrival: Arrival) -> None:
        chunk = decode(arrival.message)
        if not isinstance(chunk, KvChunk):
            raise FrameError("a write brings a chunk")
        if arrival.corrupt:
            pages = [chunk.pages[place] for place in arrival.corrupt]
            reason = f"the bytes of {len(pages)} pages are not those that were sent (first: page {pages[0]})"
            log.error("room %d: %s", chunk.room, reason)
            self._worker.receive(KvStatus(chunk.room, KVPoll.FAILED, chunk.rank, reason), now_ns(), rank)
        else:
            self._worker.receive(chunk, now_ns(), rank)

    def _send(self, outgoing: Outgoing, frame: Frame) -> None:
        if isinstance(frame, Metadata):
            self._register(outgoing.rank, outgoing.to, self.sockets.endpoint(outgoing.rank, frame.room))
            for agent in self.kv_agents:
                agent.expect()
        super()._send(outgoing, frame)

    def _register(self, rank: int, to: str, mine: str) -> None:
        """Once for each pair of sockets."""
        peer = self.peers.get(to)
        if peer is None or (rank, to, mine) in self._registered:
            return
        if len(self._registered) >= REGISTERED_LIMIT:
            self._registered = {one for one in self._registered if one[1] in self.peers}
        self._registered.add((rank, to, mine))
        memory = encode_real(self.kv_agents[rank].map) if self.kv_agents else b""
        told = Registration(mine, self.agents[rank], attn_tp_size=len(self.agents), engine_rank=rank, memory=memory)
        peer.send(encode(told), lambda: self._registered.discard((rank, to, mine)))

    def connection(self, endpoint: str, lost: bool) -> None:
        """A prefill that comes back behind the same address has forgotten us."""
        if lost:
            self._registered = {one for one in self._registered if one[1] != endpoint}

    def failed(self, outgoing: Outgoing) -> None:
        super().failed(outgoing)
        self._worker.send_failed(outgoing, now_ns())
        self._wake()

    # Questions

    async def ask_topology(self, outgoing: Outgoing) -> None:
        try:
            answer = await self._fetch_topology(outgoing.to)
        except (NoAnswer, ValidationError) as error:
            log.info("no topology of %s: %s", shown(outgoing.to), error)
            answer = None
        self._worker.topology(outgoing.to, answer, now_ns())
        self._wake()

    async def _fetch_topology(self, address: str) -> Topology:
        url = f"http://{address}/route?prefill_dp_rank={{}}&prefill_cp_rank={{}}&target_tp_rank={{}}&target_pp_rank={{}}"
        told = await self.asker.ask_json("GET", url.format(-1, -1, -1, -1), self.config.http())
        topology = TopologyAnswer.model_validate(told)
        endpoints: dict[tuple[int, int], str] = {}
        for dp in range(topology.dp_size):
            for tp in range(topology.attn_tp_size):
                told = await self.asker.ask_json("GET", url.format(dp, 0, tp, 0), self.config.http())
                rank = RankAnswer.model_validate(told)
                endpoints[dp, tp] = f"{rank.rank_ip}:{rank.rank_port}"
        return Topology(topology.attn_tp_size, topology.dp_size, endpoints, topology.follow_bootstrap_room)

    async def ask_dp_ranks(self, outgoing: Outgoing) -> None:
        frame = outgoing.frame
        assert isinstance(frame, DpRankQuery)
        body = {"bootstrap_rooms": list(frame.rooms)}
        try:
            told = await self.asker.ask_json("POST", f"http://{outgoing.to}/query_dp_ranks", self.config.http(), body)
            ranks = {int(room): int(rank) for room, rank in told.items()}
        except (NoAnswer, ValueError, AttributeError) as error:
            log.info("no DP ranks from %s: %s", shown(outgoing.to), error)
            return
        self._worker.dp_ranks(outgoing.to, ranks, now_ns())
        self._wake()

    # Heartbeats

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.config.scaled_s(self.config.heartbeat_interval_ns))
            for address in self._worker.prefills.addresses:
                await self._beat(address)

    async def _beat(self, address: str) -> None:
        try:
            await self.asker.ask("GET", f"http://{address}/health", self.config.http(2.0, 3.0))
            alive = True
        except NoAnswer:
            alive = False
        if self._worker.heartbeat(address, now_ns(), alive=alive):
            log.warning("the prefill behind %s is lost", address)
            self._wake()
