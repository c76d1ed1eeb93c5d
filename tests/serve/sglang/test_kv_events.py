"""SGLang's KV events over real sockets: replaying them gives exactly the cached pages."""

import json
from typing import Any

import msgpack
import pytest
from tests.serve.live import LiveServer
from tests.serve.sglang_live import talking
from tests.serve.test_kv_events import Subscriber, subscriber

from windtunnel.core.sglang.hashing import wire_hash
from windtunnel.serve.config import UsageError
from windtunnel.serve.flags import parse_args
from windtunnel.serve.kv_config import KvEventsConfig
from windtunnel.wire.kv_events import BlockIndex, decode

PAGE = 4
ON: dict[str, Any] = {
    "sglang__page_size": PAGE, "sglang__max_total_tokens": 40 * PAGE, "sglang__chunked_prefill_size": 8 * PAGE,
    "sglang__decode_log_interval": 1, "scheduler__max_model_len": 128,
    "kv_events__enable_kv_cache_events": True, "kv_events__publisher": "zmq",
    "kv_events__replay_endpoint": "tcp://127.0.0.1:0", "kv_events__topic": "kv@pod",
}  # fmt: skip


def prompt(name: str, words: int = 12) -> str:
    return " ".join(f"{name}{number}" for number in range(words))


async def settled(server: LiveServer) -> None:
    """Every rank is idle; with a report after each batch nothing is left to say."""
    await server.until(lambda: not server.server.jobs and all(engine.idle for engine in server.server.engines))


async def replayed(server: LiveServer, sub: Subscriber, rank: int = 0) -> list[bytes]:
    publisher = server.server.publishers[rank]
    assert publisher.replay is not None
    *batches, end = await sub.replay(publisher.replay.endpoint, 0)
    assert end == [b"", (-1).to_bytes(8, "big", signed=True), b""]
    assert [frames[:-1] for frames in batches] == [[b"", number.to_bytes(8, "big")] for number in range(publisher.sequence)]
    return [frames[-1] for frames in batches]


def cached(server: LiveServer, rank: int = 0) -> set[int]:
    tree = server.server.engines[rank].scheduler.memory.tree
    assert len(tree.cached_digests) == tree.pages
    return {wire_hash(digest) for digest in tree.cached_digests}


def index_of(payloads: list[bytes]) -> BlockIndex:
    index = BlockIndex()
    for payload in payloads:
        index.apply(decode(payload))
    return index


@pytest.mark.parametrize(("release", "maps"), [("0.5.18", False), ("0.5.20", True)])
async def test_a_replay_gives_exactly_the_cached_pages(release: str, maps: bool) -> None:
    with subscriber() as sub:
        values = {**ON, "kv_events__endpoint": sub.endpoint, "sglang__profile": release}
        async with talking(**values) as (server, client):
            for number in range(30):
                body = {
                    "text": prompt(f"w{number % 7} ", 6 + number % 9),
                    "sampling_params": {"max_new_tokens": 1 + number % 9, "ignore_eos": True},
                    "cache_salt": f"s{number}" if number % 3 == 0 else None,
                }
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
            await settled(server)
            payloads = await replayed(server, sub)
            assert index_of(payloads).hashes == cached(server)
            assert len(cached(server)) > 20
            events = [event for payload in payloads for event in msgpack.unpackb(payload)[1]]
            assert {type(event) for event in events} == {dict if maps else list}
            kinds = {decoded["type"] for payload in payloads for decoded in decode(payload).events}
            assert kinds == {"BlockStored", "BlockRemoved"}
            assert all(decode(payload).rank == 0 for payload in payloads)


async def test_events_wait_for_the_next_report() -> None:
    with subscriber() as sub:
        async with talking(**{**ON, "kv_events__endpoint": sub.endpoint}) as (server, client):
            await client.post("/generate", json={"text": prompt("a"), "sampling_params": {"max_new_tokens": 4}})
            await settled(server)
            publisher = server.server.publishers[0]
            before = publisher.sequence
            assert (await client.post("/flush_cache")).status_code == 200
            assert publisher.sequence == before
            await client.post("/generate", json={"text": prompt("b"), "sampling_params": {"max_new_tokens": 4}})
            await settled(server)
            payloads = await replayed(server, sub)
            first = next(iter(decode(payloads[before]).events))
            assert first["type"] == "AllBlocksCleared"
            assert index_of(payloads).hashes == cached(server) != set()


async def test_each_rank_has_its_own_stream() -> None:
    with subscriber() as sub:
        values = {**ON, "kv_events__endpoint": "tcp://[::ffff:127.0.0.1]:0", "data_parallel_size": 2}
        async with talking(**values) as (server, client):
            for rank in range(2):
                body = {"text": prompt(f"r{rank} "), "sampling_params": {"max_new_tokens": 4}, "routed_dp_rank": rank}
                assert (await client.post("/generate", json=body)).status_code == 200
            await settled(server)
            for rank in range(2):
                payloads = await replayed(server, sub, rank)
                assert index_of(payloads).hashes == cached(server, rank) != set()
                assert {decode(payload).rank for payload in payloads} == {rank}


async def test_a_page_tells_the_session_id_of_the_request_that_stored_it() -> None:
    """Only a request's own `session_id`: in SGLang 0.5.23 a request made from `session_params` has none."""
    with subscriber() as sub:
        async with talking(**ON | {"kv_events__endpoint": "tcp://[::ffff:127.0.0.1]:0"}) as (server, client):
            await client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s1"})
            for name, asked in (("a", {"session_params": {"id": "s1"}}), ("b", {"session_id": "s2"}), ("c", {})):
                body = {"text": prompt(f"{name} "), "sampling_params": {"max_new_tokens": 4}, **asked}
                assert (await client.post("/generate", json=body)).status_code == 200
            await settled(server)
            events = [event for payload in await replayed(server, sub) for event in msgpack.unpackb(payload)[1]]
            assert {event.get("session_id") for event in events if event["type"] == "BlockStored"} == {"s2", None}


async def test_server_info_shows_the_argument() -> None:
    with subscriber() as sub:
        async with talking(**{**ON, "kv_events__endpoint": sub.endpoint}) as (_server, client):
            told = (await client.get("/server_info")).json()["kv_events_config"]
            assert json.loads(told)["endpoint"] == sub.endpoint
            assert json.loads(told)["publisher"] == "zmq"
    async with talking() as (_server, client):
        assert (await client.get("/server_info")).json()["kv_events_config"] is None


def parsed(config: str) -> KvEventsConfig:
    return parse_args(["--engine", "sglang", "--model-path", "m", "--kv-events-config", config]).config.kv_events


def test_the_publisher_is_the_switch() -> None:
    assert not parsed("{}").publishes
    assert not parsed('{"publisher": "null"}').publishes
    on = parsed('{"publisher": "zmq", "format": "default", "topic": "t"}')
    assert on.publishes
    assert (on.endpoint, on.topic, on.buffer_steps) == ("tcp://*:5557", "t", 10_000)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[]", 'is not an object: write {"publisher": "zmq"'),
        ('{"enable_kv_cache_events": true}', "enable_kv_cache_events: no such member; those are publisher, endpoint"),
        ('{"format": "dynamo"}', "format: 'dynamo' is not simulated"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"publisher": "zmq", "endpoint": "localhost:5557"}', "endpoint: 'localhost:5557' is not an endpoint"),
    ],
)
def test_a_bad_config_is_refused_by_name(config: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(config)
    assert str(refused.value).startswith("--kv-events-config: ")
    assert says in str(refused.value)
