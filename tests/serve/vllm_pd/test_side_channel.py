"""Strangers at the side channel and on the data plane: they are counted, and nobody else notices."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.serve.live import PATIENCE_S, LiveServer, live
from tests.serve.vllm_pd.pair import COMPLETION, NIXL, pair, until

from windtunnel.core.vllm.connector.seam import Peer
from windtunnel.serve.config import UsageError
from windtunnel.serve.vllm_pd.flavour import Connection, KvTransferFlavour
from windtunnel.serve.vllm_pd.memory import NO_REGION
from windtunnel.serve.vllm_pd.side_channel import shake_hands
from windtunnel.serve.vllm_pd.transport import NixlTransport
from windtunnel.wire.vllm.side_channel import LandedAnswer, Notification, SideChannelError, encode_message


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def _connection(server: LiveServer) -> Connection:
    flavour = server.server.flavour
    assert isinstance(flavour, KvTransferFlavour)
    return flavour._connections[0]


def _transport(server: LiveServer) -> NixlTransport:
    transport = _connection(server).transport
    assert transport is not None
    return transport


async def test_the_handshake_is_vllms(context: zmq.asyncio.Context) -> None:
    """What `nixl/base_worker.py` sends and reads: a REQ socket, `[get_meta_msg, stage, rank]`, a map of two and a time."""
    async with live(kv_transfer__told=NIXL, kv_transfer__side_channel_port=0, kv_transfer__engine_id="mine") as server:
        socket = context.socket(zmq.REQ)
        socket.connect(f"tcp://127.0.0.1:{_connection(server).channel.port}")
        async with asyncio.timeout(PATIENCE_S):
            await socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            payload, clock = await socket.recv_multipart()
        told = msgspec.msgpack.decode(payload)
        assert isinstance(msgspec.msgpack.decode(clock), float)
        socket.close()
        assert told["compatibility_hash"] == _connection(server).engine.handshake.compatibility_hash
        metadata = msgspec.msgpack.decode(told["agent_metadata_bytes"])
        assert (metadata["engine_id"], metadata["block_size"], metadata["num_blocks"]) == ("mine", 16, 16384)


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"rubbish"],
        [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 7))],
        [b"", msgspec.msgpack.encode((b"get_meta_msg", 1, 0))],
        [b"lonely"],
    ],
)
async def test_other_requests_get_no_answer_and_the_next_is_served(frames: list[bytes], context: zmq.asyncio.Context) -> None:
    async with live(kv_transfer__told=NIXL, kv_transfer__side_channel_port=0) as server:
        channel = _connection(server).channel
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"tcp://127.0.0.1:{channel.port}")
        await stranger.send_multipart(frames)
        await until(lambda: channel.malformed == 1)
        stranger.close(linger=0)
        told, found = await shake_hands(context, Peer("any", "127.0.0.1", channel.port), PATIENCE_S)
        assert told.engine_id == _connection(server).engine.connector.config.engine_id
        assert found == (_transport(server).endpoint, NO_REGION)


async def test_nobody_there_is_an_error_that_says_where(context: zmq.asyncio.Context) -> None:
    with pytest.raises(SideChannelError, match=r"127\.0\.0\.1:1 within 0.05 s"):
        await shake_hands(context, Peer("e", "127.0.0.1", 1), 0.05)


async def test_a_port_that_is_taken_is_a_usage_error() -> None:
    async with live(kv_transfer__told=NIXL, kv_transfer__side_channel_port=0) as server:
        with pytest.raises(UsageError, match="cannot be bound"):
            async with live(kv_transfer__told=NIXL, kv_transfer__side_channel_port=_connection(server).channel.port):
                pass


async def test_rubbish_on_the_data_plane_harms_nobody(context: zmq.asyncio.Context) -> None:
    messages = [
        b"rubbish",
        encode_message(Notification(b"no notification")),
        encode_message(Notification(b"unknown:1")),
        encode_message(Notification(b"HB:unknown")),
        encode_message(LandedAnswer(4711, (1,))),
    ]
    async with pair() as pd:
        for server in (pd.p, pd.d):
            stranger = context.socket(zmq.PUSH)
            stranger.connect(f"tcp://{_transport(server).endpoint}")
            for message in messages:
                await stranger.send(message)
            transport = _transport(server)
            await until(lambda: transport.malformed == 2)  # noqa: B023  # awaited here
            stranger.close()
        assert (await pd.post("/v1/completions", COMPLETION)).status_code == 200
        await pd.until_idle()
