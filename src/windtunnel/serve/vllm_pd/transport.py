"""Carries out what a vLLM engine with a KV connector asks: handshakes, moves of blocks, notifications.

The engine is sans-IO. After every input the transport wakes its driver; after every turn of the driver `pump` takes what the
engine asks. Moves are timed by a `BlockMover` on this side. When a read lands, the side that was read is asked what of it was
still the request's: in vLLM nobody asks, and whatever lies there is read.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq.asyncio

from windtunnel.core.transfer.backends import SimBackend
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.mover import BlockMover, Move
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    Ask,
    AskHandshake,
    HandshakeDone,
    HandshakeFailed,
    MoveDone,
    MoveFailed,
    Notify,
    NotifyFailed,
    Peer,
    Report,
    StartRead,
    StartWrite,
)
from windtunnel.serve.clock import make_alarm, now_ns
from windtunnel.serve.sglang.sockets import Peers, RankSockets
from windtunnel.serve.vllm_pd.memory import NO_REGION, Region
from windtunnel.serve.vllm_pd.side_channel import SideChannel, shake_hands
from windtunnel.wire.vllm.nixl import decode, encode
from windtunnel.wire.vllm.side_channel import (
    LandedAnswer,
    LandedQuestion,
    Message,
    Notification,
    decode_message,
    encode_message,
)

log = logging.getLogger("windtunnel.serve")

SOCKET_FLOOR_S = 1.0
"""Times of the real server divide by the time scale, but a socket always gets so long."""
HANDSHAKE_S = 5.0
"""vLLM's receive timeout of a handshake, in `nixl/worker.py`."""
_SEND_S = 1.0
_LANDED_S = 5.0
HANDSHAKES_LIMIT = 256
_LOST = "the remote agent has gone"


class Mover(Protocol):
    """What moves blocks: `SimMover`, or NIXL with real bytes (`serve.vllm_pd.memory`)."""

    @property
    def checks(self) -> bool:
        """A read that is done says itself which places are foreign; otherwise the side that was read is asked."""
        ...

    def connect(self, peer: Peer, region: Region) -> None:
        """Hands have been shaken. Raises ValueError for a side that cannot be read."""
        ...

    def find_peer(self, address: str) -> None: ...

    def lose_peer(self, address: str, now_ns: int) -> None: ...

    def start(self, move: Move, now_ns: int) -> None: ...

    def next_event_at(self) -> int | None: ...

    def run(self, now_ns: int, overwritten: Callable[[Move], Sequence[int]]) -> list[MoveDone | MoveFailed]: ...


class SimMover(BlockMover):
    """Moves that take time only."""

    checks = False
    backend: SimBackend

    def connect(self, peer: Peer, region: Region) -> None:
        """Raises ValueError for a side that waits for real bytes."""
        if region.metadata:
            raise ValueError("the other side moves real bytes: start this one with --kv-transfer-backend nixl, too")
        self.find_peer(f"{peer.host}:{peer.port}")

    def find_peer(self, address: str) -> None:
        self.backend.find_peer(address)

    def lose_peer(self, address: str, now_ns: int) -> None:
        self.backend.lose_peer(address, now_ns)


@dataclass(slots=True)
class _Landed:
    """A read that has landed and whose other side has been asked."""

    endpoint: str
    expiry: asyncio.TimerHandle


class NixlTransport:
    """One engine's. Owned by the event loop's thread; `start`, `pump` after every turn, `close` in the end."""

    def __init__(
        self,
        engine: ConnectorEngine,
        channel: SideChannel,
        sockets: RankSockets,
        mover: Mover,
        wake: Callable[[], None],
        time_scale: float = 1.0,
        region: Region = NO_REGION,
    ) -> None:
        """`region` is what the side channel tells of this engine's memory."""
        self._region = region
        self.malformed = 0
        """Messages of the data plane that could not be read."""
        self.channel = channel
        self._engine = engine
        self._mover = mover
        self._sockets = sockets
        self._wake = wake
        self._scale = time_scale
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0
        self._endpoints: dict[str, str] = {}
        """Engine id → its data plane."""
        self._addresses: dict[str, set[str]] = {}
        """Data plane → the side channels that named it: how the mover's backend knows a peer."""
        self._moves: dict[int, StartRead | StartWrite] = {}
        self._landed: dict[int, _Landed] = {}
        self._loop = asyncio.get_running_loop()
        self._alarm = make_alarm(self._loop, self._moved)

    @property
    def endpoint(self) -> str:
        """ip:port of this engine's data plane."""
        return self._sockets.endpoints[0]

    @property
    def context(self) -> zmq.asyncio.Context:
        return self._sockets.context

    def _socket_s(self, seconds: float) -> float:
        return max(SOCKET_FLOOR_S, seconds / self._scale)

    async def start(self) -> None:
        self._peers = Peers(self.context, self._socket_s(_SEND_S), self._connection)
        self.spawn(self.channel.serve(lambda: self._engine.handshake, self.endpoint, self._region))
        self.spawn(self._listen(self._sockets.sockets[0][0][0]))

    async def close(self) -> None:
        self._alarm.close()
        for landed in self._landed.values():
            landed.expiry.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()
        self.channel.close()
        self._sockets.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, report: Report) -> None:
        self._engine.receive(report, now_ns())
        self._wake()

    # What the engine asks

    def pump(self) -> None:
        """Carry out what the engine asks, and say what it has to say."""
        for line in self._engine.take_warnings():
            log.warning("%s", line)
        for ask in self._engine.take_outgoing():
            self.perform(ask)

    def perform(self, ask: Ask) -> None:
        if isinstance(ask, AskHandshake):
            self._handshake(ask)
        elif isinstance(ask, Notify):
            self._notify(ask)
        else:
            self._move(ask)

    def _handshake(self, ask: AskHandshake) -> None:
        if self._handshakes >= HANDSHAKES_LIMIT:
            self._later(HandshakeFailed(ask.peer, f"{HANDSHAKES_LIMIT} handshakes are under way already"))
            return
        self._handshakes += 1
        self.spawn(self._shake(ask))

    async def _shake(self, ask: AskHandshake) -> None:
        report: Report
        try:
            told, found = await shake_hands(self.context, ask.peer, self._socket_s(HANDSHAKE_S))
            report = HandshakeDone(ask.peer, told)
            if found is not None:
                self._mover.connect(ask.peer, found.region)
                self._found(ask.peer, told.engine_id, found.endpoint)
        except ValueError as error:
            log.error("handshake with %s: %s", ask.peer.engine_id, error)
            report = HandshakeFailed(ask.peer, str(error))
        finally:
            self._handshakes -= 1
        self._report(report)

    def _found(self, peer: Peer, engine_id: str, endpoint: str) -> None:
        address = f"{peer.host}:{peer.port}"
        self._endpoints[engine_id] = endpoint
        self._addresses.setdefault(endpoint, set()).add(address)
        self._mover.find_peer(address)
        self._peers.get(endpoint)

    def _notify(self, ask: Notify) -> None:
        def failed() -> None:
            self._later(NotifyFailed(ask.peer, ask.notification, _LOST))

        self._send(self._endpoints.get(ask.peer.engine_id, ""), Notification(encode(ask.notification)), failed)

    def _send(self, endpoint: str, message: Message, failed: Callable[[], None]) -> None:
        peer = self._peers.get(endpoint) if endpoint else None
        if peer is None:
            failed()
        else:
            peer.send([encode_message(message)], failed)

    def _later(self, report: Report) -> None:
        """Not from within a turn of the driver."""
        self._loop.call_soon(self._report, report)

    # Moves

    def _move(self, ask: StartRead | StartWrite) -> None:
        if ask.peer.engine_id not in self._endpoints:
            self._later(MoveFailed(ask.number, _LOST))
            return
        self._moves[ask.number] = ask
        self._mover.start(ask, now_ns())
        self._set_alarm()

    def _set_alarm(self) -> None:
        at_ns = self._mover.next_event_at()
        if at_ns is None:
            self._alarm.clear()
        else:
            self._alarm.set(at_ns)

    def _moved(self) -> None:
        for report in self._mover.run(now_ns(), _not_known_yet):
            ask = self._moves.pop(report.number)
            if isinstance(report, MoveDone) and isinstance(ask, StartRead) and not self._mover.checks:
                self._ask_what_landed(ask)
            else:
                self._report(report)
        self._set_alarm()

    def _ask_what_landed(self, ask: StartRead) -> None:
        endpoint, number = self._endpoints[ask.peer.engine_id], ask.number

        def failed() -> None:
            self._settle(number, MoveFailed(number, _LOST))

        expiry = self._loop.call_later(self._socket_s(_LANDED_S), failed)
        self._landed[number] = _Landed(endpoint, expiry)
        self._send(endpoint, LandedQuestion(self.endpoint, number, ask.remote_request_id, ask.remote_blocks), failed)

    def _settle(self, number: int, report: MoveDone | MoveFailed) -> None:
        """Once for each read that has landed."""
        landed = self._landed.pop(number, None)
        if landed is not None:
            landed.expiry.cancel()
            self._report(report)

    # What others say

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart()
            try:
                self._heard(decode_message(b"".join(parts)))
            except ValueError as error:
                self.malformed += 1
                log.warning("data plane: %s", error)

    def _heard(self, message: Message) -> None:
        if isinstance(message, Notification):
            self._report(Arrived(decode(message.payload)))
        elif isinstance(message, LandedQuestion):
            foreign = self._engine.overwritten(message.request_id, message.blocks)
            self._send(message.reply_to, LandedAnswer(message.number, foreign), _forget)
        else:
            self._settle(message.number, MoveDone(message.number, message.foreign))

    def _connection(self, endpoint: str, lost: bool) -> None:
        """A connection to a peer has ended, or begun. Reads that wait for an answer of it fail at once."""
        for address in self._addresses.get(endpoint, ()):
            if lost:
                log.info("the agent behind %s has gone", address)
                self._mover.lose_peer(address, now_ns())
            else:
                self._mover.find_peer(address)
        if not lost:
            return
        for number in [number for number, landed in self._landed.items() if landed.endpoint == endpoint]:
            self._settle(number, MoveFailed(number, _LOST))
        self._set_alarm()

    # Looking in

    def debug(self) -> dict[str, Any]:
        return {
            "side_channel_port": self.channel.port,
            "data_plane": self.endpoint,
            "peers": dict(self._endpoints),
            "handshakes_under_way": self._handshakes,
            "moves": len(self._moves) + len(self._landed),
            "malformed_messages": self.malformed + self.channel.malformed,
        }


def _not_known_yet(_move: object) -> tuple[int, ...]:
    """The mover wants it at once; the other side is asked instead."""
    return ()


def _forget() -> None:
    """An answer that nobody takes any more."""
