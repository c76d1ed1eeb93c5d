"""Peers by endpoint: strangers' endpoints never shut a good one out."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from tests.serve.live import PATIENCE_S

from windtunnel.serve.pd import sockets
from windtunnel.serve.pd.sockets import Peers

NOWHERE = "127.0.0.1:1"


@asynccontextmanager
async def peers(needed: Collection[str] = ()) -> AsyncIterator[tuple[Peers, zmq.asyncio.Context]]:
    context = zmq.asyncio.Context()
    made = Peers(context, PATIENCE_S, lambda _endpoint, _lost: None, lambda: needed)
    try:
        yield made, context
    finally:
        await made.close()
        context.destroy(linger=0)


@pytest.fixture(autouse=True)
def _two_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PEERS_LIMIT", 2)


async def test_a_new_peer_takes_the_place_of_the_least_recently_used() -> None:
    async with peers() as (made, _context):
        for endpoint in ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1", "127.0.0.1:3"):
            assert made.get(endpoint) is not None
        assert [endpoint in made for endpoint in ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")] == [True, False, True]


async def test_who_is_needed_keeps_its_place() -> None:
    needed = {"127.0.0.1:1"}
    async with peers(needed) as (made, _context):
        kept = made.get("127.0.0.1:1")
        for port in range(2, 12):
            assert made.get(f"127.0.0.1:{port}") is not None
        assert made.get("127.0.0.1:1") is kept
        needed.add("127.0.0.1:11")
        assert made.get("127.0.0.1:12") is None


async def test_a_dropped_peer_comes_back_and_its_socket_is_closed() -> None:
    async with peers() as (made, context):
        listener = context.socket(zmq.PULL)
        good = f"127.0.0.1:{listener.bind_to_random_port('tcp://127.0.0.1')}"
        first = made.get(good)
        assert first is not None
        for port in range(1, 9):
            made.get(f"127.0.0.1:{port}")
        assert good not in made
        await asyncio.gather(*made._dropping)
        assert first._socket.closed and first._monitor.closed
        again = made.get(good)
        assert again is not None
        again.send([b"hello"], lambda: None)
        async with asyncio.timeout(PATIENCE_S):
            assert await listener.recv_multipart() == [b"hello"]
        listener.close(linger=0)


async def test_what_a_dropped_peer_has_not_handed_over_has_failed() -> None:
    failed: list[int] = []
    async with peers() as (made, _context):
        peer = made.get(NOWHERE)
        assert peer is not None
        for number in range(3):
            peer.send([b"lost"], lambda number=number: failed.append(number))  # type: ignore[misc]
        await asyncio.sleep(0)  # the first has left the queue
        assert peer._queue.qsize() == 2
        made.get("127.0.0.1:2")
        made.get("127.0.0.1:3")
        await asyncio.gather(*made._dropping)
        assert failed == [0, 1, 2]
