"""Carries out what a vLLM engine with the Mooncake connector asks (`mooncake_connector.py` of vLLM 0.33.0).

A prefill takes pulls at a ROUTER socket, whose address it has registered with a bootstrap server, and answers there. A decode
asks that server where an engine is, opens a DEALER socket for each `Pulls` and waits for answers. A DEALER connects again in
silence, so a decode does not notice that a prefill has gone; a prefill does notice a decode, as its write fails.
"""

import asyncio
import logging
import random
from collections.abc import Collection
from contextlib import suppress

import httpx
import zmq
import zmq.asyncio

from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector.mover import address as peer_address
from windtunnel.core.vllm.connector.seam import Arrived, HandshakeDone, Notify, NotifyFailed, Peer, Pulled, Pulls
from windtunnel.serve.beside import Beside
from windtunnel.serve.clock import now_ns
from windtunnel.serve.driver import EngineDriver
from windtunnel.serve.pd.http_client import HttpAsker, NoAnswer
from windtunnel.serve.transfer import sim_backend
from windtunnel.serve.vllm_pd.base import SimMover, Transport, remember
from windtunnel.serve.vllm_pd.bootstrap import Registry, build
from windtunnel.serve.vllm_pd.connection import Connection, Rank, numeric
from windtunnel.serve.vllm_pd.side_channel import address
from windtunnel.wire.vllm.mooncake import (
    BYTES_LIMIT,
    MooncakeError,
    Registration,
    decode_answers,
    decode_pulls,
    encode_answer,
    encode_error,
    encode_pulls,
    worker_addresses,
)

log = logging.getLogger("windtunnel.serve")

ATTEMPTS = 3
"""Of a question to a bootstrap server, and of a registration there."""
_QUERY_PAUSE_S = 0.1
_REGISTER_PAUSE_S = 1.0
PULLS_LIMIT = 1024
"""DEALER sockets at once."""
ASKERS_LIMIT = 65536
"""Requests of others that wait for an answer; the oldest is forgotten."""
_QUEUE_LIMIT = 1024


class MooncakeTransport(Transport):
    """See `Transport`."""

    def __init__(self, connection: "MooncakeConnection", driver: EngineDriver) -> None:
        super().__init__(connection.engine, connection.sockets, connection.mover, driver.wake, connection.time_scale)
        self._own = connection
        self._listener = connection.listener
        self._asker = HttpAsker()
        self._patience = httpx.Timeout(self._socket_s(connection.connector_timeout_s))
        self._workers: dict[Peer, str] = {}
        """Where a peer takes pulls, as the bootstrap server that was named with it has said; the oldest first."""
        self._askers: dict[tuple[str, str], bytes] = {}
        """Decode's engine id and its request id → the ROUTER's name for who waits for the answer."""
        self._pulling = 0

    async def start(self) -> None:
        await super().start()
        if self._listener is not None:
            self.spawn(self._listen(self._listener))

    async def close(self) -> None:
        await super().close()
        await self._asker.close()

    # A decode

    async def _greet(self, peer: Peer) -> HandshakeDone:
        """Ask the bootstrap server. Raises ValueError."""
        found = await self._query(peer)
        if peer.engine_id not in found:
            where = f"{shown(peer.host)}:{peer.port}"
            raise ValueError(f"remote engine_id {shown(peer.engine_id)} not found from bootstrap server {where}")
        remember(self._workers, peer, found[peer.engine_id])
        mine = self._engine.handshake
        return HandshakeDone(peer, mine._replace(engine_id=peer.engine_id))

    async def _query(self, peer: Peer) -> dict[str, str]:
        if not peer.port:
            raise ValueError(f"the bootstrap address is {shown(peer.host)}: must be http://HOST:PORT")
        url = f"http://[{peer.host}]:{peer.port}/query" if ":" in peer.host else f"http://{peer.host}:{peer.port}/query"
        return worker_addresses(await self._insist("GET", url, _QUERY_PAUSE_S))

    async def _insist(self, method: str, url: str, pause_s: float, body: dict[str, object] | None = None) -> bytes:
        """Again while nobody answers; a bad answer is one. Raises ValueError."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._asker.ask(method, url, self._patience, body)
            except NoAnswer as error:
                if attempt == ATTEMPTS or error.__cause__ is None:
                    raise ValueError(f"after {attempt} attempts: {error}") from error
                await asyncio.sleep(pause_s * attempt / self._scale)
        raise AssertionError("the last attempt has returned or raised")

    def _notify(self, ask: Notify) -> None:
        notification = ask.notification
        if isinstance(notification, Pulled):
            self._answer(ask.peer, notification)
        elif isinstance(notification, Pulls) and self._pulling < PULLS_LIMIT:
            where = self._workers[ask.peer]
            self._pulling += 1
            self.spawn(self._pull(where, notification))
        else:
            self._later(NotifyFailed(ask.peer, notification, f"{PULLS_LIMIT} pulls are under way already"))

    async def _pull(self, where: str, pulls: Pulls) -> None:
        waiting = {pull.request_id for pull in pulls.pulls}
        reason = "peer finished without reporting a transfer result"
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(f"tcp://{where}")
            await socket.send(encode_pulls(pulls))
            while waiting:
                async with asyncio.timeout(self._pull_s):
                    data = await socket.recv()
                answers = decode_answers(data)
                for one in answers.pulled:
                    waiting.discard(one.request_id)
                    self._report(Arrived(one))
                if answers.error is not None or any(one.last for one in answers.pulled):
                    reason = answers.error or reason
                    break
        except (zmq.ZMQError, TimeoutError, UnicodeError, MooncakeError) as error:
            reason = shown(f"transfer failed: {type(error).__name__} {error}")
        finally:
            self._pulling -= 1
            socket.close(linger=0)
        for request_id in waiting:
            self._report(Arrived(Pulled(request_id, reason)))

    @property
    def _pull_s(self) -> float:
        """The engine's own patience ends first, unless it is very short."""
        config = self._engine.connector.config
        return max(1.0, 1.1 * (config.hold_ns + config.pull_margin_ns) / 1e9)

    # A prefill

    async def register(self, url: str) -> None:
        """With a bootstrap server. Raises OSError."""
        connection = self._own
        told = Registration(
            engine_id=self._engine.connector.config.engine_id,
            dp_rank=connection.number,
            tp_rank=0,
            pp_rank=0,
            addr=address(self._sockets.host, connection.pull_port),
        )
        try:
            await self._insist("POST", f"{url}/register", _REGISTER_PAUSE_S, told.model_dump())
        except ValueError as error:
            raise OSError(f"the bootstrap server {url} does not take the registration {error}") from error

    async def _listen(self, listener: zmq.asyncio.Socket) -> None:
        while True:
            frames = await listener.recv_multipart()
            try:
                self._heard(frames[0], decode_pulls(frames[-1]))
            except MooncakeError as error:
                self.malformed += 1
                log.warning("pull: %s", error)
                await listener.send_multipart([frames[0], encode_error(str(error))])
            except Exception:
                log.exception("a pull could not be taken")

    def _heard(self, asker: bytes, pulls: Pulls) -> None:
        with suppress(zmq.ZMQError, UnicodeError):  # an endpoint that is none: the write goes on, and lands nowhere
            self._peers.get(peer_address(pulls.decode))
        for pull in pulls.pulls:
            self._askers[pulls.decode.engine_id, pull.request_id] = asker
            if len(self._askers) > ASKERS_LIMIT:
                del self._askers[next(iter(self._askers))]
        self._report(Arrived(pulls))

    def _answer(self, decode: Peer, answer: Pulled) -> None:
        asker = self._askers.pop((decode.engine_id, answer.request_id), None)
        if asker is not None and self._listener is not None:
            self.spawn(self._send(self._listener, [asker, encode_answer(answer)]))

    async def _send(self, listener: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        await listener.send_multipart(frames)

    def _connection(self, endpoint: str, lost: bool) -> None:
        if lost:
            log.info("the decode behind %s has gone", shown(endpoint))
            self._mover.lose_peer(endpoint, now_ns())
        else:
            self._mover.find_peer(endpoint)
        self._set_alarm()

    def _needed(self) -> Collection[str]:
        return {peer_address(move.peer) for move in self._moves.values()}

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        return options(self.context.socket(kind))

    # Looking in

    def debug(self) -> dict[str, object]:
        return {
            "bootstrap": self._own.bootstrap_url,
            "pull_port": self._own.pull_port,
            "data_plane": self.endpoint,
            "peers": {peer.engine_id: address for peer, address in self._workers.items()},
            "moves": len(self._moves),
            "pulls": self._pulling,
            "malformed_messages": self.malformed,
        }


class MooncakeConnection(Connection):
    """With a bootstrap server on the first rank of a prefill."""

    bootstrap: Beside | None
    """That server; its address is known to all ranks once it has started."""

    def __init__(self, rank: Rank, first: "MooncakeConnection | None" = None) -> None:
        """`first`: the rank that has the server. Raises ValueError, OSError."""
        settings = rank.told.kv_transfer
        self.number = rank.number
        self.connector_timeout_s = settings.mooncake_connector_timeout_ns / 1e9
        self._first = first
        self._elsewhere = settings.parsed("-").config.bootstrap_server_address
        self._sends = settings.parsed("-").config.role != "kv_consumer"
        super().__init__(rank, numeric(settings.mooncake_host))
        self.bootstrap = None
        if self._sends and first is None and not self._elsewhere:
            self.bootstrap = Beside(build(Registry()), self.sockets.host, settings.mooncake_bootstrap_port)
        self.time_scale = self._time_scale
        self.mover = SimMover(sim_backend(settings, self._time_scale, random.Random(rank.chance.random())))

    def _open(self, rank: Rank, host: str) -> int:
        self.listener: zmq.asyncio.Socket | None = None
        self.pull_port = 0
        if self._sends:
            self.listener = options(self.sockets.context.socket(zmq.ROUTER))
            self.pull_port = int(self.listener.bind_to_random_port(address(host, "").rstrip(":")))
        return self.sockets.sockets[0][0][1]

    def _shut(self) -> None:
        if self.listener is not None:
            self.listener.close(linger=0)

    @property
    def bootstrap_url(self) -> str | None:
        """Of the server that this rank is registered with."""
        if self._elsewhere and self._sends:
            return f"http://{self._elsewhere}"
        server = self.bootstrap if self._first is None else self._first.bootstrap
        return None if server is None else server.url

    def _make_transport(self, driver: EngineDriver) -> MooncakeTransport:
        return MooncakeTransport(self, driver)

    async def _connect(self, transport: Transport) -> None:
        if self.bootstrap is not None:
            await self.bootstrap.start()
            log.info("Mooncake Bootstrap Server started at %s", self.bootstrap.url)
        if self.bootstrap_url is not None and isinstance(transport, MooncakeTransport):
            await transport.register(self.bootstrap_url)

    async def close(self) -> None:
        await super().close()
        if self.bootstrap is not None:
            await self.bootstrap.close()


def options(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    for option, value in (
        (zmq.RCVHWM, _QUEUE_LIMIT),
        (zmq.SNDHWM, _QUEUE_LIMIT),
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.MAXMSGSIZE, BYTES_LIMIT),
    ):
        socket.setsockopt(option, value)
    return socket
