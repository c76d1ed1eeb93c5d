"""The ZMQ sockets of one P/D process: PULL on an ephemeral port for each rank, PUSH to each peer (SGLang reference §4.1).

An SGLang rank may listen on several sockets (`listen_sockets`): they stand for so many decode ranks, whose rooms spread over a
prefill's transfer queues (a room's queue is the sum of its destination ports, modulo the number of queues).
A vLLM engine has one.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from windtunnel.core.shown import shown

log = logging.getLogger("windtunnel.serve")

SEND_QUEUE_LIMIT = 4096
RECEIVE_QUEUE_LIMIT = 4096
PEERS_LIMIT = 4096
_BIND_TRIES = 200
_ROOMS_REMEMBERED = 65536
PORT_MODULUS = 128
"""Ports of a rank's many sockets differ modulo this and are never divisible by it."""
_PORT_BLOCKS = (160, 480)
"""Ports from 20480 to 61439."""


class RankSockets:
    """The listening side. Bound when made, so that the ports are known before the engine is."""

    def __init__(self, host: str, ranks: int, listen_sockets: int = 1) -> None:
        """Raises ValueError for more sockets than there are residues."""
        if not 1 <= listen_sockets < PORT_MODULUS:
            raise ValueError(f"listen_sockets is {listen_sockets}: must be between 1 and {PORT_MODULUS - 1}")
        self.context = zmq.asyncio.Context()
        self.host = host
        self._turns: dict[int, int] = {}
        self._rooms = 0
        self.sockets = [self._bind(listen_sockets) for _ in range(ranks)]

    def _bind(self, count: int) -> list[tuple[zmq.asyncio.Socket, int]]:
        """Sockets whose ports differ modulo `PORT_MODULUS`, none divisible by it. One alone takes any ephemeral port."""
        if count == 1:
            socket = self._socket()
            return [(socket, int(socket.bind_to_random_port(f"tcp://{self.host}")))]
        found: list[tuple[zmq.asyncio.Socket, int]] = []
        for residue in random.sample(range(1, PORT_MODULUS), count):
            found.append(self._bind_to_residue(residue))
        return found

    def _bind_to_residue(self, residue: int) -> tuple[zmq.asyncio.Socket, int]:
        socket = self._socket()
        for _ in range(_BIND_TRIES):
            port = PORT_MODULUS * random.randrange(*_PORT_BLOCKS) + residue
            with suppress(zmq.ZMQError):
                socket.bind(f"tcp://{self.host}:{port}")
                return socket, port
        raise OSError(f"no free port with the residue {residue} modulo {PORT_MODULUS} on {self.host}")

    def _socket(self) -> zmq.asyncio.Socket:
        socket = self.context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_LIMIT)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ip:port of each rank."""
        return tuple(f"{self.host}:{sockets[0][1]}" for sockets in self.sockets)

    def endpoint(self, rank: int, room: int) -> str:
        """The socket of a rank that serves a room: rooms take turns as they come."""
        sockets = self.sockets[rank]
        return f"{self.host}:{sockets[self._turn(room) % len(sockets)][1]}"

    def _turn(self, room: int) -> int:
        turn = self._turns.get(room)
        if turn is None:
            turn = self._turns[room] = self._rooms
            self._rooms += 1
            if len(self._turns) > _ROOMS_REMEMBERED:
                del self._turns[next(iter(self._turns))]
        return turn

    def close(self) -> None:
        for sockets in self.sockets:
            for socket, _port in sockets:
                socket.close()
        self.context.destroy(linger=0)


class Peer:
    """The way to one rank of the other side: a bounded queue and the task that empties it, in order."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, timeout_s: float, on_lost: Callable[[bool], None]) -> None:
        """`on_lost(True)` when the connection ends, `on_lost(False)` when there is one again.

        Raises ZMQError or UnicodeError for what is no endpoint.
        """
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_LIMIT)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._queue: asyncio.Queue[tuple[float, list[bytes], Callable[[], None]]] = asyncio.Queue(SEND_QUEUE_LIMIT)
        self._sending: Callable[[], None] | None = None
        """What to call if the message that has left the queue is not handed over."""
        try:
            self._socket.connect(f"tcp://{endpoint}")
        except (zmq.ZMQError, UnicodeError):
            self._close_sockets()
            raise
        self._tasks = [asyncio.ensure_future(self._run()), asyncio.ensure_future(self._watch())]

    def send(self, parts: Sequence[bytes], failed: Callable[[], None]) -> None:
        """`failed` is called instead when the message cannot be handed over in time."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            self._queue.put_nowait((deadline, list(parts), failed))
        except asyncio.QueueFull:
            failed()

    async def _run(self) -> None:
        while True:
            deadline, parts, failed = await self._queue.get()
            self._sending = failed
            try:
                async with asyncio.timeout_at(deadline):
                    await self._socket.send_multipart(parts)
            except (TimeoutError, zmq.ZMQError):
                failed()
            self._sending = None

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            self._on_lost(event == zmq.EVENT_DISCONNECTED)

    async def drop(self) -> None:
        """Close; what is not handed over has failed."""
        await self.close()
        if self._sending is not None:
            self._sending()
        while not self._queue.empty():
            _deadline, _parts, failed = self._queue.get_nowait()
            failed()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0)


def _nobody() -> Collection[str]:
    return ()


class Peers:
    """All peers of one rank's side, by endpoint: at most `PEERS_LIMIT`, a new one in the place of the least recently used."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        timeout_s: float,
        on_lost: Callable[[str, bool], None],
        needed: Callable[[], Collection[str]] = _nobody,
    ) -> None:
        """`needed`: endpoints whose connections are watched; they keep their places."""
        self._context = context
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._needed = needed
        self._peers: dict[str, Peer] = {}
        """The least recently used first."""
        self._dropping: set[asyncio.Task[None]] = set()

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._peers

    def get(self, endpoint: str) -> Peer | None:
        """The peer, connected on first use; None when there are too many that are needed."""
        peer = self._peers.pop(endpoint, None)
        if peer is None:
            if len(self._peers) >= PEERS_LIMIT and not self._make_room():
                log.warning("%d peers are in use already: %s is left out", PEERS_LIMIT, shown(endpoint))
                return None
            peer = Peer(self._context, endpoint, self._timeout_s, lambda lost: self._on_lost(endpoint, lost))
        self._peers[endpoint] = peer
        return peer

    def _make_room(self) -> bool:
        needed = self._needed()
        oldest = next((endpoint for endpoint in self._peers if endpoint not in needed), None)
        if oldest is None:
            return False
        dropping = asyncio.ensure_future(self._peers.pop(oldest).drop())
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)
        return True

    async def close(self) -> None:
        await asyncio.gather(*self._dropping)
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
