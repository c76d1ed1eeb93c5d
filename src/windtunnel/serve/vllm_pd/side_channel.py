"""The side channel of one engine: a ZMQ ROUTER that answers handshakes, and the question to others' (vLLM reference §7.2)."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import zmq
import zmq.asyncio

from windtunnel.core.shown import shown
from windtunnel.core.vllm.connector.seam import Handshake, Peer
from windtunnel.serve.clock import now_ns
from windtunnel.serve.vllm_pd.memory import NO_REGION, Region
from windtunnel.wire.vllm.side_channel import (
    MESSAGE_LIMIT_BYTES,
    AgentMetadata,
    SideChannelError,
    agent_bytes,
    agent_of,
    decode_answer,
    decode_request,
    encode_answer,
    encode_clock,
    encode_request,
)

log = logging.getLogger("windtunnel.serve")

QUEUE_LIMIT = 1024
_FRAMES = 3
"""Who asks, an empty frame, the message: what a REQ socket makes."""


def address(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class SideChannel:
    """Bound when made, so that the port is known before the engine is. Raises OSError."""

    def __init__(self, context: zmq.asyncio.Context, host: str, port: int) -> None:
        self.malformed = 0
        """Requests that could not be read; they get no answer, as from vLLM."""
        self._socket = context.socket(zmq.ROUTER)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(address(host, port or "*"))
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(f"{host}:{port} cannot be bound: {error.strerror}") from None
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.port = int(bound.rpartition(b":")[2].rstrip(b"\0"))

    async def serve(self, answer: Callable[[], Handshake], endpoint: str, region: Region) -> None:
        """Answer until cancelled. `endpoint` is where the data plane listens, `region` the memory behind it."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != _FRAMES or frames[1]:
                    raise SideChannelError(f"{len(frames)} frames: must be the three of a REQ socket")
                stage, rank = decode_request(frames[2])
                if stage or rank >= answer().tp_size:
                    raise SideChannelError(f"rank {rank} of {answer().tp_size} in pipeline stage {stage} of 1 is asked for")
            except SideChannelError as error:
                self.malformed += 1
                log.warning("side channel: %s", error)
                continue
            told = _told(answer(), rank, endpoint, region)
            await self._socket.send_multipart([frames[0], b"", told, encode_clock(now_ns() / 1e9)])

    def close(self) -> None:
        self._socket.close(linger=0)


_OPTIONS = {
    zmq.RCVHWM: QUEUE_LIMIT,
    zmq.SNDHWM: QUEUE_LIMIT,
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: MESSAGE_LIMIT_BYTES,
    zmq.IPV6: 1,
}


def _told(mine: Handshake, rank: int, endpoint: str, region: Region) -> bytes:
    metadata = AgentMetadata(
        engine_id=mine.engine_id,
        agent_metadata=agent_bytes(endpoint, region.metadata),
        kv_caches_base_addr=[region.address] if region.metadata else [],
        device_id=rank,
        num_blocks=mine.num_blocks,
        block_lens=[region.block_bytes] if region.metadata else [],
        kv_cache_layout="HND",
        block_size=mine.block_size,
        tp_size=mine.tp_size,
    )
    return encode_answer(mine.compatibility_hash, metadata)


class Found(NamedTuple):
    """Behind a side channel: where the data plane listens, and the memory."""

    endpoint: str
    region: Region


async def shake_hands(context: zmq.asyncio.Context, peer: Peer, patience_s: float) -> tuple[Handshake, Found | None]:
    """What the side channel of `peer` says, and what is behind it (None: its metadata cannot be read).

    Raises SideChannelError for no answer in time and for one that is none.
    """
    socket = context.socket(zmq.REQ)
    for option in (zmq.LINGER, zmq.IPV6):
        socket.setsockopt(option, _OPTIONS[option])
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
    try:
        async with asyncio.timeout(patience_s):
            socket.connect(address(peer.host, peer.port))
            await socket.send(encode_request(0))
            answer = (await socket.recv_multipart())[0]
    except TimeoutError:
        raise SideChannelError(f"no answer from {shown(peer.host)}:{peer.port} within {patience_s:g} s") from None
    except zmq.ZMQError as error:
        raise SideChannelError(f"{shown(peer.host)}:{peer.port}: {error.strerror}") from None
    finally:
        socket.close(linger=0)
    compatibility_hash, metadata = decode_answer(answer)
    if metadata is None:
        return Handshake(peer.engine_id, compatibility_hash, 0, 0), None
    told = Handshake(metadata.engine_id, compatibility_hash, metadata.block_size, metadata.num_blocks, metadata.tp_size)
    endpoint, nixl = agent_of(metadata)
    where = (*metadata.kv_caches_base_addr, 0)[0], (*metadata.block_lens, 0)[0]
    return told, Found(endpoint, Region(nixl, *where) if nixl else NO_REGION)
