"""Carries out what a vLLM engine with a NIXL connector asks: handshakes, moves of blocks, notifications.

When a read lands, the side that was read is asked what of it was still the request's: in vLLM nobody asks, and whatever lies
there is read.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.mover import address
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    HandshakeDone,
    MoveDone,
    MoveFailed,
    Notify,
    NotifyFailed,
    Peer,
    Report,
    StartRead,
    StartWrite,
)
from windtunnel.serve.clock import now_ns
from windtunnel.serve.pd.sockets import RankSockets
from windtunnel.serve.vllm_pd.base import LOST, Mover, Transport, remember
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

HANDSHAKE_S = 5.0
"""vLLM's receive timeout of a handshake, in `nixl/worker.py`."""
_LANDED_S = 5.0


@dataclass(slots=True)
class _Landed:
    """A read that has landed and whose other side has been asked."""

    endpoint: str
    expiry: asyncio.TimerHandle


class NixlTransport(Transport):
    """See `Transport`."""

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
        super().__init__(engine, sockets, mover, wake, time_scale)
        self._region = region
        self.channel = channel
        self._endpoints: dict[Peer, str] = {}
        """Its data plane; as many as the engine itself remembers, the oldest first."""
        self._landed: dict[int, _Landed] = {}

    async def start(self) -> None:
        await super().start()
        self.spawn(self.channel.serve(lambda: self._engine.handshake, self.endpoint, self._region))
        self.spawn(self._listen(self._sockets.sockets[0][0][0]))

    async def close(self) -> None:
        for landed in self._landed.values():
            landed.expiry.cancel()
        await super().close()
        self.channel.close()

    # What the engine asks

    async def _greet(self, peer: Peer) -> HandshakeDone:
        """Who is remembered is whom the engine takes: else false ids at a true address would push good peers out."""
        told, found = await shake_hands(self.context, peer, self._socket_s(HANDSHAKE_S))
        if found is not None and self._engine.connector.peers.mismatch(peer, told) is None:
            self._mover.connect(peer, found.region)
            self._found(peer, found.endpoint)
        return HandshakeDone(peer, told)

    def _found(self, peer: Peer, endpoint: str) -> None:
        self._peers.get(endpoint)
        forgotten = remember(self._endpoints, peer, endpoint)
        self._mover.find_peer(address(peer))
        if forgotten is not None:
            self._forget(forgotten)

    def _forget(self, peer: Peer) -> None:
        self._mover.forget(peer)
        if all(address(other) != address(peer) for other in self._endpoints):
            self._mover.find_peer(address(peer))

    def _notify(self, ask: Notify) -> None:
        def failed() -> None:
            self._later(NotifyFailed(ask.peer, ask.notification, LOST))

        self._send(self._endpoints.get(ask.peer, ""), Notification(encode(ask.notification)), failed)

    def _send(self, endpoint: str, message: Message, failed: Callable[[], None]) -> None:
        peer = self._peers.get(endpoint) if endpoint else None
        if peer is None:
            failed()
        else:
            peer.send([encode_message(message)], failed)

    def _failed_alone(self, report: Report) -> None:
        landed = self._landed.pop(report.number, None) if isinstance(report, MoveFailed) else None
        if landed is not None:
            landed.expiry.cancel()
        super()._failed_alone(report)

    # Moves

    def _move(self, ask: StartRead | StartWrite) -> None:
        if ask.peer in self._endpoints:
            super()._move(ask)
        else:
            self._later(MoveFailed(ask.number, LOST))

    def _ended(self, report: MoveDone | MoveFailed) -> None:
        """A move that has failed on its way to the mover is known no more."""
        ask = self._moves.pop(report.number, None)
        if isinstance(report, MoveDone) and isinstance(ask, StartRead) and not self._mover.checks:
            self._ask_what_landed(ask)
        elif ask is not None:
            self._report(report)

    def _ask_what_landed(self, ask: StartRead) -> None:
        endpoint, number = self._endpoints[ask.peer], ask.number

        def failed() -> None:
            self._settle(number, MoveFailed(number, LOST))

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
            except Exception:
                log.exception("data plane: a message could not be answered")

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
        for where in {address(peer) for peer, known in self._endpoints.items() if known == endpoint}:
            if lost:
                log.info("the agent behind %s has gone", shown(where))
                self._mover.lose_peer(where, now_ns())
            else:
                self._mover.find_peer(where)
        if not lost:
            return
        for number in [number for number, landed in self._landed.items() if landed.endpoint == endpoint]:
            self._settle(number, MoveFailed(number, LOST))
        self._set_alarm()

    def _needed(self) -> Collection[str]:
        return {*self._endpoints.values(), *(landed.endpoint for landed in self._landed.values())}

    # Looking in

    def debug(self) -> dict[str, Any]:
        return {
            "side_channel_port": self.channel.port,
            "data_plane": self.endpoint,
            "peers": {peer.engine_id: endpoint for peer, endpoint in self._endpoints.items()},
            "handshakes_under_way": self._handshakes,
            "moves": len(self._moves) + len(self._landed),
            "malformed_messages": self.malformed + self.channel.malformed,
        }


def _forget() -> None:
    """An answer that nobody takes any more."""
