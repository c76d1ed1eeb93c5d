"""`SubscribeKvEvents`: a subscriber knows exactly the cache, and the load in between."""

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as pb
from tests.serve.grpc_live import GrpcServer, answer, grpc_live, request
from tests.serve.live import PATIENCE_S

from windtunnel.core.outputs import AllBlocksCleared
from windtunnel.serve.grpc_events import BACKLOG_MAX, HEARTBEAT_S, Batch, Beat, Subscriber
from windtunnel.wire.family import WireError
from windtunnel.wire.grpc_events import signed_hash

ON: dict[str, Any] = {
    "scheduler__block_size": 4,
    "scheduler__num_gpu_blocks": 40,
    "scheduler__max_model_len": 128,
    "kv_events__enable_kv_cache_events": True,
    "kv_events__endpoint": "tcp://*:0",
}


class Cache:
    """What the stream says is cached."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.sequences: list[int] = []
        self.ids: list[int] = []

    def apply(self, batch: pb.KvEventBatch) -> None:
        assert batch.HasField("load")
        if batch.load.load_only:
            return
        self.sequences.append(batch.sequence_number)
        for event in batch.events:
            self.ids.append(event.event_id)
            kind = event.WhichOneof("data")
            if kind == "stored":
                self.hashes |= {block.block_hash for block in event.stored.blocks}
            elif kind == "removed":
                self.hashes -= set(event.removed.block_hashes)
            else:
                self.hashes.clear()


def subscribe(server: GrpcServer, **options: Any) -> Any:
    return server.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(**options), timeout=PATIENCE_S)


async def test_the_stream_tells_what_the_cache_holds() -> None:
    async with grpc_live(**ON) as server:
        call, cache = subscribe(server), Cache()
        await call.initial_metadata()
        for number in range(12):
            await answer(server, request(f"prompt {number} " * 5, max_tokens=20))
        await server.stub.FlushCache(pb.FlushCacheRequest())
        await answer(server, request("after the flush " * 4, max_tokens=9))
        expected = {signed_hash(digest) for digest in server.live.server.engine.cached_hashes}
        async with asyncio.timeout(PATIENCE_S):
            while cache.hashes != expected:
                cache.apply(await call.read())
        assert cache.sequences == list(range(len(cache.sequences)))
        assert cache.ids == list(range(1, len(cache.ids) + 1))
        assert expected
        call.cancel()


async def test_a_stored_block_has_its_tokens_and_its_parent() -> None:
    async with grpc_live(**ON) as server:
        call = subscribe(server)
        await call.initial_metadata()
        await answer(server, request("one two three four five six", max_tokens=1))
        ids = server.live.server.tokenizer.encode("one two three four five six")
        batch = await call.read()
        (event,) = batch.events
        blocks = event.stored.blocks
        assert [token for block in blocks for token in block.token_ids] == ids[: len(blocks) * 4]
        assert [block.block_size for block in blocks] == [4] * len(blocks)
        assert not event.stored.HasField("parent_block_hash")
        assert (batch.dp_rank, event.stored.medium, event.stored.tier) == (0, "GPU", pb.KV_CACHE_TIER_DEVICE)
        await answer(server, request("one two three four five six seven eight nine ten", max_tokens=1))
        second = await call.read()
        while second.load.load_only:
            second = await call.read()
        assert second.events[0].stored.parent_block_hash == blocks[-1].block_hash
        call.cancel()


async def test_load_records_come_before_the_first_batch_when_asked_for() -> None:
    async with grpc_live(**ON, pacing__itl_ns=10**12) as server:
        call = subscribe(server, load_records_before_first_batch=True)
        first = await call.read()
        assert (first.sequence_number, first.load.load_only, len(first.events)) == (0, True, 0)
        assert (first.load.running_requests, first.load.max_running_requests) == (0, 256)
        held = server.stub.Generate(request("hi"))
        async with asyncio.timeout(PATIENCE_S):
            while (told := await call.read()).load.running_requests != 1:
                pass
        assert told.load.sample > first.load.sample
        held.cancel()
        call.cancel()


async def test_what_cannot_be_subscribed_has_its_status() -> None:
    async with grpc_live(**ON) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(subscribe(server, start_sequence_number=5)))
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    async with grpc_live() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(subscribe(server)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_subscriber_that_falls_behind_is_told_to_come_back() -> None:
    subscriber = Subscriber(lambda rank: pb.EngineLoad(), 1, early=False)
    for sequence in range(BACKLOG_MAX):
        subscriber.push(Batch(sequence, 0.0, (AllBlocksCleared(),), 0))
    assert (await subscriber.next())[0].sequence_number == 0
    subscriber.push(Batch(BACKLOG_MAX, 0.0, (AllBlocksCleared(),), 0))
    subscriber.push(Batch(BACKLOG_MAX + 1, 0.0, (AllBlocksCleared(),), 0))
    with pytest.raises(WireError, match="behind"):
        await subscriber.next()


def test_heartbeats_follow_changes_and_silence() -> None:
    beat = Beat(0)
    idle, busy = pb.EngineLoad(), pb.EngineLoad(running_requests=1)
    assert beat.due(idle, 0.0)
    beat.told(idle, 0.0, 0)
    assert not beat.due(idle, HEARTBEAT_S / 2)
    assert beat.due(busy, HEARTBEAT_S / 2)
    for at in (1.0, 2.0):
        assert beat.due(idle, at)
        beat.told(idle, at, 0)
    assert not beat.due(idle, 2.0 + HEARTBEAT_S)
    assert beat.due(idle, 7.0)


def test_a_hash_is_signed() -> None:
    assert signed_hash(b"\0" * 24 + b"\xff" * 8) == -1
    assert signed_hash(b"\0" * 31 + b"\7") == 7
