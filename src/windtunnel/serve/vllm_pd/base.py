"""What carries out the asks of a vLLM engine with a KV connector: the part that is the same for every connector.

One ask's or one report's failure, whatever it is, becomes that one's failed report and touches no other request.

The engine is sans-IO. After every input the transport wakes its driver; after every turn of the driver `pump` takes what the
engine asks. Moves are timed by a mover on this side.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

import zmq.asyncio

from windtunnel.core.shown import shown
from windtunnel.core.transfer.backends import SimBackend
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.mover import BlockMover, Move, address
from windtunnel.core.vllm.connector.peers import MAX_PEERS
from windtunnel.core.vllm.connector.seam import (
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
from windtunnel.serve.pd.sockets import Peers, RankSockets
from windtunnel.serve.vllm_pd.memory import Region

log = logging.getLogger("windtunnel.serve")

SOCKET_FLOOR_S = 1.0
"""Times of the real server divide by the time scale, but a socket always gets so long."""
SEND_S = 1.0
HANDSHAKES_LIMIT = 256
LOST = "the remote agent has gone"


class Mover(Protocol):
    """What moves blocks: `SimMover`, or NIXL with real bytes (`serve.vllm_pd.memory`)."""

    @property
    def checks(self) -> bool:
        """A read that is done says itself which places are foreign; otherwise the side that was read is asked."""
        ...

    def connect(self, peer: Peer, region: Region) -> None:
        """Hands have been shaken. Raises ValueError for a side that cannot be read."""
        ...

    def forget(self, peer: Peer) -> None:
        """Its handshake is no longer remembered."""
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
        self.find_peer(address(peer))

    def forget(self, peer: Peer) -> None:
        """Nothing: the backend knows addresses only."""

    def find_peer(self, address: str) -> None:
        self.backend.find_peer(address)

    def lose_peer(self, address: str, now_ns: int) -> None:
        self.backend.lose_peer(address, now_ns)


class Transport(ABC):
    """One engine's. Owned by the event loop's thread; `start`, `pump` after every turn, `close` in the end."""

    def __init__(
        self, engine: ConnectorEngine, sockets: RankSockets, mover: Mover, wake: Callable[[], None], time_scale: float
    ) -> None:
        self.malformed = 0
        """Messages that could not be read."""
        self._engine = engine
        self._mover = mover
        self._sockets = sockets
        self._wake = wake
        self._scale = time_scale
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0
        self._moves: dict[int, StartRead | StartWrite] = {}
        self._loop = asyncio.get_running_loop()
        self._alarm = make_alarm(self._loop, self._moved)
        self._peers: Peers

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
        self._peers = Peers(self.context, self._socket_s(SEND_S), self._connection, self._needed)

    async def close(self) -> None:
        self._alarm.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()
        self._sockets.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, report: Report) -> None:
        self._engine.receive(report, now_ns())
        self._wake()

    def _later(self, report: Report) -> None:
        """Not from within a turn of the driver."""
        self._loop.call_soon(self._report, report)

    # What the engine asks

    def pump(self) -> None:
        """Carry out what the engine asks, and say what it has to say."""
        for line in self._engine.take_warnings():
            log.warning("%s", line)
        for ask in self._engine.take_outgoing():
            self.perform(ask)

    def perform(self, ask: Ask) -> None:
        try:
            self._perform(ask)
        except Exception as error:
            log.exception("%s to %s", type(ask).__name__, shown(ask.peer.engine_id))
            self._failed_alone(_failure_of(ask, reason_of(error)))

    def _perform(self, ask: Ask) -> None:
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
            report = await self._greet(ask.peer)
        except Exception as error:
            exc_info = None if isinstance(error, ValueError) else error
            log.error("handshake with %s: %s", shown(ask.peer.engine_id), shown(str(error)), exc_info=exc_info)
            report = HandshakeFailed(ask.peer, shown(str(error)))
        finally:
            self._handshakes -= 1
        self._report(report)

    @abstractmethod
    async def _greet(self, peer: Peer) -> HandshakeDone:
        """Raises ValueError for a peer that cannot be used."""

    @abstractmethod
    def _notify(self, ask: Notify) -> None: ...

    def _failed_alone(self, report: Report) -> None:
        if isinstance(report, MoveFailed):
            self._moves.pop(report.number, None)
        self._later(report)

    # Moves

    def _move(self, ask: StartRead | StartWrite) -> None:
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
            try:
                self._ended(report)
            except Exception as error:
                log.exception("the end of move %d", report.number)
                self._failed_alone(MoveFailed(report.number, reason_of(error)))
        self._set_alarm()

    def _ended(self, report: MoveDone | MoveFailed) -> None:
        """A move that has failed on its way to the mover is known no more."""
        if self._moves.pop(report.number, None) is not None:
            self._report(report)

    @abstractmethod
    def _connection(self, endpoint: str, lost: bool) -> None:
        """A connection to a peer's data plane has ended, or begun."""

    @abstractmethod
    def _needed(self) -> Collection[str]:
        """Data planes whose connections are watched."""

    @abstractmethod
    def debug(self) -> dict[str, Any]: ...


def remember(known: dict[Peer, str], peer: Peer, where: str) -> Peer | None:
    """As many as the engine itself does (`core.vllm.connector.peers`), and the same ones: the oldest handshake goes.

    Who has gone for it is returned.
    """
    known.pop(peer, None)
    oldest = next(iter(known)) if len(known) >= MAX_PEERS else None
    if oldest is not None:
        del known[oldest]
    known[peer] = where
    return oldest


def reason_of(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {error}")


def _failure_of(ask: Ask, reason: str) -> Report:
    if isinstance(ask, AskHandshake):
        return HandshakeFailed(ask.peer, reason)
    if isinstance(ask, Notify):
        return NotifyFailed(ask.peer, ask.notification, reason)
    return MoveFailed(ask.number, reason)


def _not_known_yet(_move: object) -> tuple[int, ...]:
    """The mover wants it at once; the other side is asked instead."""
    return ()
