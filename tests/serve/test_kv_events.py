"""The KV-event stream of a live server over real sockets: a subscriber that comes late and replays knows exactly the cache."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.serve.golden import load, needs_golden
from tests.serve.live import PATIENCE_S, LiveServer, RawClient, live, request_bytes
from tests.serve.test_operations import call

from windtunnel.core.kv.hashing import wire_hash
from windtunnel.serve import kv_events
from windtunnel.serve.config import UsageError
from windtunnel.serve.engines import host_blocks
from windtunnel.serve.flags import parse_args
from windtunnel.serve.kv_config import KvEventsConfig, endpoint_of_rank
from windtunnel.serve.kv_events import KvPublisher, ReplayBuffer
from windtunnel.wire.kv_events import END_SEQUENCE, BlockIndex, EventBatch, EventCodec, decode

ON: dict[str, Any] = {
    "scheduler__block_size": 4, "scheduler__num_gpu_blocks": 40, "scheduler__max_model_len": 128, "dev_mode": True,
    "enable_prompt_tokens_details": True, "kv_events__enable_kv_cache_events": True,
}  # fmt: skip


class Subscriber:
    """A SUB socket that has bound, as it must for an endpoint without a wildcard, and a DEALER for replays."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.endpoint = f"tcp://127.0.0.1:{self.sub.bind_to_random_port('tcp://127.0.0.1')}"
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")

    async def message(self) -> tuple[bytes, int, EventBatch]:
        async with asyncio.timeout(PATIENCE_S):
            topic, sequence, payload = await self.sub.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), decode(payload)

    async def replay(self, endpoint: str, start: int) -> list[list[bytes]]:
        """All frames of the answer, the end marker last."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        async with asyncio.timeout(PATIENCE_S):
            while not answers or answers[-1][-2] != END_SEQUENCE:
                answers.append(await dealer.recv_multipart())
        dealer.close(linger=0)
        return answers


@contextlib.contextmanager
def subscriber() -> Iterator[Subscriber]:
    made = Subscriber()
    try:
        yield made
    finally:
        made.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publishing(**values: Any) -> AsyncIterator[tuple[LiveServer, Subscriber]]:
    with subscriber() as sub:
        events = {
            "kv_events__endpoint": sub.endpoint,
            "kv_events__replay_endpoint": "tcp://127.0.0.1:0",
            "kv_events__topic": "kv@pod@wt-model",
        }
        async with live(**{**ON, **events, **values}) as server:
            yield server, sub


async def complete(server: LiveServer, prompt: str, max_tokens: int = 4, **members: Any) -> dict[str, Any]:
    body = {"model": "wt-model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **members}
    status, answer = await call(server, "POST", "/v1/completions", body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def words(name: str) -> str:
    return " ".join(f"{name}{number}" for number in range(12))


def cached(server: LiveServer, rank: int = 0) -> set[int]:
    return {wire_hash(digest) for digest in server.server.engines[rank].cached_hashes}


async def first_heard(server: LiveServer, sub: Subscriber) -> tuple[bytes, int, EventBatch]:
    """A publisher that has just connected loses messages: make events until one arrives."""
    async with asyncio.timeout(PATIENCE_S):
        for attempt in count():
            await complete(server, words(f"start{attempt} "))
            if await sub.sub.poll(20):
                break
    return await sub.message()


async def test_stream_and_replay_give_the_cache() -> None:
    async with publishing() as (server, sub):
        publisher = server.server.publishers[0]
        topic, first, batch = await first_heard(server, sub)
        assert topic == b"kv@pod@wt-model"
        index = BlockIndex()
        assert publisher.replay is not None
        for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]:
            if int.from_bytes(frames[2], "big") < first:
                index.apply(decode(frames[3]))
        index.apply(batch)
        for number in range(30):
            await complete(
                server, words(f"w{number % 7} "), 1 + number % 9, cache_salt=f"s{number}" if number % 3 == 0 else None
            )
        heard = first
        while heard < publisher.sequence - 1:
            _topic, sequence, batch = await sub.message()
            assert sequence == heard + 1
            heard = sequence
            index.apply(batch)
        assert index.hashes == cached(server)
        assert len(index.hashes) > 20
        kinds = {
            event["type"]
            for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]
            for event in decode(frames[3]).events
        }
        assert kinds == {"BlockStored", "BlockRemoved"}


async def test_replay_has_the_recorded_frames() -> None:
    async with publishing() as (server, sub):
        for number in range(8):
            await complete(server, words(f"p{number} "))
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        answers = await sub.replay(publisher.replay.endpoint, 3)
        assert [frames[:3] for frames in answers[:-1]] == [
            [b"", b"kv@pod@wt-model", number.to_bytes(8, "big")] for number in range(3, publisher.sequence)
        ]
        assert answers[-1] == [b"", b"", END_SEQUENCE, b""]
        index = BlockIndex()
        for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]:
            index.apply(decode(frames[3]))
        assert index.hashes == cached(server)


async def test_a_long_replay_is_whole_while_the_server_serves() -> None:
    async with publishing() as (server, sub):
        publisher = server.server.publishers[0]
        await complete(server, words("a "))
        _sequence, payload = publisher.buffer.since(0)[-1]
        for number in range(publisher.sequence, 5000):
            publisher.buffer.append(number, payload)
        publisher.sequence = 5000
        assert publisher.replay is not None
        replay = asyncio.create_task(sub.replay(publisher.replay.endpoint, 0))
        await complete(server, words("b "))
        answers = await replay
        assert [int.from_bytes(frames[2], "big") for frames in answers[:5000]] == list(range(5000))


async def test_a_malformed_replay_request_is_ignored_and_the_next_one_answered() -> None:
    async with publishing() as (server, sub):
        await complete(server, words("a "))
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        dealer = sub.context.socket(zmq.DEALER)
        dealer.connect(publisher.replay.endpoint)
        await dealer.send_multipart([b"what"])
        await dealer.send_multipart([b"", b"123456789"])
        await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        async with asyncio.timeout(PATIENCE_S):
            assert (await dealer.recv_multipart())[2] == (0).to_bytes(8, "big")


async def test_the_buffer_forgets_the_oldest() -> None:
    async with publishing(kv_events__buffer_steps=3) as (server, sub):
        for number in range(8):
            await complete(server, words(f"p{number} "))
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        answers = await sub.replay(publisher.replay.endpoint, 0)
        assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == list(
            range(publisher.sequence - 3, publisher.sequence)
        )


def test_the_buffer_is_bounded_in_bytes() -> None:
    buffer = ReplayBuffer(100, bytes_max=10)
    for number in range(5):
        buffer.append(number, b"1234")
    assert (buffer.since(0), buffer.size_bytes) == ([(3, b"1234"), (4, b"1234")], 8)


async def test_a_reset_while_idle_is_published_with_the_next_step() -> None:
    async with publishing() as (server, _sub):
        await complete(server, words("a "))
        publisher = server.server.publishers[0]
        before = publisher.sequence
        assert await call(server, "POST", "/reset_prefix_cache") == (200, {"success": True})
        assert cached(server) == set()
        assert publisher.sequence == before
        await complete(server, words("b "))
        events = [event["type"] for _number, payload in publisher.buffer.since(before) for event in decode(payload).events]
        assert events[:2] == ["AllBlocksCleared", "BlockStored"]
        assert "AllBlocksCleared" not in events[1:]


@pytest.mark.parametrize(("mode", "published"), [("full", True), ("other", False)])
async def test_report_mode_full_publishes_hits_again(mode: str, published: bool) -> None:
    async with publishing() as (server, _sub):
        await complete(server, words("a "), 1)
        publisher = server.server.publishers[0]
        before, known = publisher.sequence, cached(server)
        await complete(server, words("a "), 1, vllm_xargs={"kv_cache_report_mode": mode})
        stored = [
            value
            for _number, payload in publisher.buffer.since(before)
            for event in decode(payload).events
            for value in event["block_hashes"]
        ]
        assert bool(known & set(stored)) is published


async def test_cached_tokens_at_the_client_in_the_events_and_in_the_metrics_agree() -> None:
    async with publishing() as (server, _sub):
        await complete(server, words("a "), 1)
        hits = server.gauge("vllm:prefix_cache_hits_total")
        by_source = server.gauge("vllm:prompt_tokens_cached_total")
        usage = (await complete(server, words("a "), 1))["usage"]
        tokens = usage["prompt_tokens_details"]["cached_tokens"]
        assert tokens >= 4 and tokens % 4 == 0
        assert tokens == (usage["prompt_tokens"] - 1) // 4 * 4
        assert server.gauge("vllm:prefix_cache_hits_total") - hits == tokens
        assert server.gauge("vllm:prompt_tokens_cached_total") - by_source == tokens
        stored = [event for _n, payload in server.server.publishers[0].buffer.since(0) for event in decode(payload).events]
        assert sum(len(event["token_ids"]) for event in stored) == usage["prompt_tokens"] // 4 * 4


async def test_batches_may_wait_for_so_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.serve.kv_events._BATCH_WAITS_S", 3600.0)
    async with publishing(kv_events__batch_events=25) as (server, _sub):
        publisher = server.server.publishers[0]
        for number in range(20):
            await complete(server, words(f"w{number} "), 2)
        batches = [decode(payload).events for _n, payload in publisher.buffer.since(0)]
        assert batches and all(len(batch) >= 25 for batch in batches)


async def test_a_batch_waits_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is turned by hand."""
    assert kv_events._BATCH_WAITS_S == 1.0
    monkeypatch.setattr(kv_events, "_BATCH_WAITS_S", 3600.0)
    async with publishing(kv_events__batch_events=1000) as (server, _sub):
        publisher = server.server.publishers[0]
        await complete(server, words("a "), 1)
        await complete(server, words("b "), 1)
        assert publisher.sequence == 0, "two events are no batch"
        assert publisher._flush is not None
        monkeypatch.setattr(kv_events, "_BATCH_WAITS_S", 0.0)
        publisher._stop_waiting()
        await complete(server, words("c "), 1)
        await server.until(lambda: publisher.sequence == 1)
        ((_sequence, payload),) = publisher.buffer.since(0)
        index = BlockIndex()
        index.apply(decode(payload))
        assert index.hashes == cached(server)


async def look(server: LiveServer, url: str) -> int:
    """Cached tokens of a question about one image."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    body = {"model": "wt-model", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, answer = await call(server, "POST", "/v1/chat/completions", body)
    assert status == 200 and isinstance(answer, dict), answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_image_is_part_of_the_prefix_and_of_its_events() -> None:
    async with publishing(media_tokens=40) as (server, _sub):
        assert await look(server, "cat.png") == 0
        first = await look(server, "dog.png")
        assert first < 40, "only what stands before the image is common"
        assert await look(server, "cat.png") > 40
        batches = [decode(payload) for _n, payload in server.server.publishers[0].buffer.since(0)]
        keys = [key for batch in batches for event in batch.events for key in event.get("extra_keys") or () if key]
        identifiers = {identifier for block in keys for identifier, _offset in block}
        assert len(identifiers) == 2
        assert {offset for block in keys for _identifier, offset in block} == {
            keys[0][0][1] - 4 * at for at in range(len(keys) // 2)
        }


async def test_no_events_without_the_flag() -> None:
    async with live(dev_mode=True) as server:
        assert server.server.publishers == ()
        assert await call(server, "GET", "/kv_event_sources") == (200, {})


@needs_golden
def test_sources_are_the_recorded_ones() -> None:
    (case,) = [case for case in load("probe") if case["name"] == "kv_event_sources"]
    recorded = json.loads(case["response"]["body"])
    wanted = {
        name: recorded["0"][name] for name in ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic")
    }
    config = parse_args(["m", "--kv-events-config", json.dumps(wanted)]).config.kv_events
    ours = {"0": config.source(config.endpoint, config.replay_endpoint)}
    assert json.dumps(ours, separators=(",", ":")) == case["response"]["body"]


async def test_sources_show_the_port_that_zero_became() -> None:
    async with publishing() as (server, sub):
        status, sources = await call(server, "GET", "/kv_event_sources")
        assert status == 200
        assert sources["0"]["endpoint"] == sub.endpoint
        host, _, port = sources["0"]["replay_endpoint"].rpartition(":")
        assert host == "tcp://127.0.0.1" and int(port) > 0


async def test_bound_on_loopback_alone_with_any_free_port() -> None:
    with subscriber() as sub:
        try:
            probe = sub.context.socket(zmq.PUB)
            probe.setsockopt(zmq.IPV6, 1)
            probe.bind("tcp://[::ffff:127.0.0.1]:0")
        except zmq.ZMQError:
            pytest.skip("no IPv6 sockets here")
        async with live(**ON, kv_events__endpoint="tcp://[::ffff:127.0.0.1]:0", kv_events__topic="kv@b") as server:
            _status, sources = await call(server, "GET", "/kv_event_sources")
            port = sources["0"]["endpoint"].removeprefix("tcp://[::ffff:127.0.0.1]:")
            assert int(port) > 0
            sub.sub.connect(f"tcp://127.0.0.1:{port}")
            topic, _sequence, batch = await first_heard(server, sub)
            assert (topic, batch.rank) == (b"kv@b", 0)


async def test_a_publisher_binds_where_vllm_binds(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    first = KvPublisher(KvEventsConfig(True, endpoint=f"ipc://{tmp_path}/kv"), EventCodec(), 0, loop)
    second = KvPublisher(KvEventsConfig(True, endpoint=f"ipc://{tmp_path}/kv"), EventCodec(), 1, loop)
    assert second.endpoint == f"ipc://{tmp_path}/kv_dp1"
    assert (tmp_path / "kv").exists() and (tmp_path / "kv_dp1").exists()
    first.close()
    second.close()


async def test_a_taken_replay_endpoint_is_a_usage_error_and_leaves_no_socket() -> None:
    with subscriber() as sub:
        config = KvEventsConfig(True, endpoint="tcp://127.0.0.1:9", replay_endpoint=sub.endpoint)
        with pytest.raises(UsageError, match="Address already in use"):
            KvPublisher(config, EventCodec(), 0, asyncio.get_running_loop())


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("tcp://*:0", "tcp://*:0"),
        ("inproc://kv", "inproc://kv_dp2"),
    ],
)
def test_endpoint_of_a_rank(endpoint: str, expected: str) -> None:
    assert endpoint_of_rank(endpoint, 0) == endpoint
    assert endpoint_of_rank(endpoint, 2) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ('{"enabled": true}', "enabled: no such member; those are enable_kv_cache_events"),
        ('{"hwm": 0}', r">= 1.*\$\.hwm"),
        ('{"buffer_steps": "many"}', r"\$\.buffer_steps"),
        ('{"publisher": "kafka"}', r"\$\.publisher"),
        ('{"endpoint": "localhost:5557"}', "endpoint: 'localhost:5557' is not an endpoint"),
        ('{"endpoint": "tcp://*:70000"}', "endpoint: 'tcp://"),
        ('{"replay_endpoint": "tcp://*"}', "replay_endpoint: 'tcp://"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0"}', "has no port to connect to"),
    ],
)
def test_a_bad_config_is_refused_by_name(config: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^--kv-events-config: .*{says}"):
        parse_args(["m", "--kv-events-config", config])


def test_flags_of_llm_d() -> None:
    args = [
        "m",
        "--enable-kvcache",
        "--zmq-endpoint",
        "tcp://h:5557",
        "--use-vllm-map-event-format",
        "false",
        "--hash-seed",
        "7",
    ]
    config = parse_args([*args, "--kv-events-replay-endpoint", "tcp://*:5558", "--kv-events-replay-queue-size", "9"]).config
    assert config.kv_events == KvEventsConfig(True, None, "tcp://h:5557", "tcp://*:5558", 9, form="array")
    assert config.hash_seed == "7"


def test_ports_of_all_ranks_must_exist() -> None:
    with pytest.raises(UsageError, match="leaves no port"):
        parse_args(["m", "--data-parallel-size", "4", "--kv-events-config", '{"endpoint": "tcp://*:65533"}'])


async def test_aborted_requests_leave_an_exact_stream() -> None:
    async with publishing(pacing__itl_ns=10**6) as (server, sub):
        for number in range(6):
            client = await RawClient.connect(server.port)
            body = {"model": "wt-model", "prompt": words(f"x{number} "), "max_tokens": 60, "ignore_eos": True, "stream": True}
            client.send(request_bytes("/v1/completions", body))
            await client.read_until(b"data: ")
            client.leave("rst")
        await server.until(lambda: not server.states() and not server.server.jobs)
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        index = BlockIndex()
        for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]:
            index.apply(decode(frames[3]))
        assert index.hashes == cached(server)


async def test_a_block_tells_the_session_of_the_request_that_stored_it() -> None:
    async with publishing() as (server, sub):
        await complete(server, words("one "), session_id="s")
        await complete(server, words("two "))
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        batches = [decode(frames[3]) for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]]
        told = [event.get("session_id") for batch in batches for event in batch.events]
        assert {None, "s"} == set(told)


async def test_each_medium_is_exact_with_a_host_and_a_disk_tier() -> None:
    tiers = {"scheduler__kv_offloading_blocks": 15, "scheduler__kv_offloading_disk_blocks": 60}
    async with publishing(**tiers) as (server, sub):
        for number in range(30):
            await complete(server, words(f"w{number % 7} "), 1 + number % 9)
        publisher = server.server.publishers[0]
        assert publisher.replay is not None
        gpu, cpu, disk = BlockIndex("GPU"), BlockIndex("CPU"), BlockIndex("STORAGE")
        for frames in (await sub.replay(publisher.replay.endpoint, 0))[:-1]:
            gpu.apply(decode(frames[3]))
            cpu.apply(decode(frames[3]))
            disk.apply(decode(frames[3]))
        assert gpu.hashes == cached(server)
        assert cpu.hashes == {wire_hash(digest) for digest in server.server.engine.host_hashes}
        assert disk.hashes == {wire_hash(digest) for digest in server.server.engine.disk_hashes}
        assert len(cpu.hashes) > 10 and len(disk.hashes) > 10
        assert (
            server.gauge("vllm:external_prefix_cache_queries_total") > server.gauge("vllm:external_prefix_cache_hits_total") > 0
        )


@pytest.mark.parametrize(("source", "tiers"), [("host", (200, 0)), ("disk", (1, 200))])
async def test_metrics_tell_the_tiers_apart(source: str, tiers: tuple[int, int]) -> None:
    blocks = {"scheduler__kv_offloading_blocks": tiers[0], "scheduler__kv_offloading_disk_blocks": tiers[1]}
    async with publishing(**blocks) as (server, _sub):
        first = await complete(server, words("again "))
        prompt_tokens = first["usage"]["prompt_tokens"]
        for number in range(8):
            await complete(server, words(f"crowd{number} "))
        before = {source: by_source(server, source) for source in ("device", source)}
        answer = await complete(server, words("again "))
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == (prompt_tokens - 1) // 4 * 4
        assert by_source(server, source) - before[source] == found
        assert by_source(server, "device") == before["device"]


def by_source(server: LiveServer, source: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    from windtunnel.wire.metrics import render

    text = render(server.server.metrics.store).decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_cached_by_source_total" and sample.labels["source"] == source
    )


def test_the_size_of_the_host_tier() -> None:
    def blocks(*args: str) -> int:
        return host_blocks(parse_args(["m", *args]).config)

    assert blocks() == 0
    assert blocks("--kv-offloading-blocks", "7") == 7
    assert blocks("--kv-offloading-size", "1", "--block-size", "16") == (1 << 30) // (16 * 131072), "Llama-3.1-8B in BF16"
    with pytest.raises(UsageError, match="say the same thing"):
        parse_args(["m", "--kv-offloading-size", "1", "--kv-offloading-blocks", "7"])
    with pytest.raises(UsageError, match="needs prefix caching"):
        parse_args(["m", "--kv-offloading-size", "1", "--no-enable-prefix-caching"])
    with pytest.raises(UsageError, match="stands behind them"):
        parse_args(["m", "--kv-offloading-disk-blocks", "9"])


@pytest.mark.parametrize(("tier", "status"), [({"kv_offloading_gib": 1.0}, 400), ({"kv_offloading_blocks": 9}, 200)])
async def test_another_gpu_model_does_not_resize_a_host_tier(tier: dict[str, Any], status: int) -> None:
    async with live(**{f"scheduler__{name}": size for name, size in tier.items()}) as server:
        before = server.server.engine.config.host_blocks
        assert before > 0
        told, answer = await call(server, "POST", "/admin/config", {"gpu_model": "llama-3.1-70b", "itl": "1ms"})
        assert (told, "kv-offloading-blocks" in str(answer)) == (status, status == 400)
        assert server.server.engine.config.host_blocks == before
        assert server.server.config.pacing.itl_ns == (0 if status == 400 else 1_000_000)
        assert (await complete(server, "hello", 2))["usage"]["completion_tokens"] == 2
