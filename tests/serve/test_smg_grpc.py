"""smg 1.13.0 between a client and the gRPC worker (clients.md §4.2). Skipped where smg is not installed."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as rpc
from tests.serve.golden import split
from tests.serve.grpc_live import GrpcServer, grpc_live
from tests.serve.live import PATIENCE_S, RawClient, request_bytes
from tests.serve.test_grpc_process import grpc_port, start
from tests.serve.vllm_pd.pair import NIXL, at_rest, counters

SMG = os.environ.get("WINDTUNNEL_SMG") or shutil.which("smg")
pytestmark = pytest.mark.skipif(
    SMG is None, reason="no smg: install smg==1.13.0 into an environment of its own and set WINDTUNNEL_SMG to its `smg`"
)
PATH = "/v1/chat/completions"
CHAT = {"model": "wt-model", "messages": [{"role": "user", "content": "storm [wt:7]"}], "max_tokens": 12}
START_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def smg(*workers: GrpcServer, policy: str = "round_robin") -> AsyncIterator[int]:
    """The port of a router that has taken its workers in."""
    urls = [f"grpc://{worker.address}" for worker in workers]
    async with router("--policy", policy, "--worker-urls", *urls, workers=len(urls)) as port:
        yield port


@contextlib.asynccontextmanager
async def router(*arguments: str, workers: int) -> AsyncIterator[int]:
    assert SMG is not None
    port = free_port()
    command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await ready(port, workers)
        yield port
    finally:
        process.kill()
        await process.wait()


async def ready(port: int, workers: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                told = json.loads((await get(port, "/workers"))[2])
                chat = CHAT | {"max_tokens": 1, "model": told["workers"][0].get("model_id") or "wt-model"}
                if len(told["workers"]) == workers and (await post(port, chat))[0] == 200:
                    return
            await asyncio.sleep(0.05)


async def get(port: int, path: str) -> tuple[int, Any, bytes]:
    client = await RawClient.connect(port)
    client.send(f"GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
    return split(await client.read_all())


async def post(port: int, body: dict[str, Any]) -> tuple[int, Any, bytes]:
    client = await RawClient.connect(port)
    client.send(request_bytes(PATH, body, extra="Connection: close\r\n"))
    return split(await client.read_all())


def text_of(body: bytes) -> str:
    """Of a stream or of a whole answer."""
    if not body.lstrip().startswith((b"{", b"data:")):
        body = unchunked(body)
    if not body.startswith(b"data:"):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    frames = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"])


def unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return out


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_the_text_is_the_one_that_the_worker_gives_over_http(engine: str) -> None:
    async with grpc_live(engine=engine) as worker, smg(worker) as port:
        for extra in ({}, {"stop": ["e"]}, {"max_tokens": 300}):
            body = CHAT | extra
            expected = text_of((await post(worker.live.port, body))[2])
            assert text_of((await post(port, body))[2]) == expected
            status, _, streamed = await post(port, body | {"stream": True})
            assert status == 200
            assert text_of(streamed) == expected
            assert b"data: [DONE]" in streamed


async def test_two_workers_share_the_load_and_give_the_same_text() -> None:
    async with grpc_live() as first, grpc_live() as second, smg(first, second) as port:
        texts = {text_of((await post(port, CHAT))[2]) for _ in range(4)}
        assert texts == {text_of((await post(first.live.port, CHAT))[2])}
        for worker in (first, second):
            assert worker.live.gauge("vllm:request_success_total") >= 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_the_router_frees_the_worker(stream: bool, engine: str) -> None:
    """While streaming smg calls Abort and drains until the worker ends the stream; otherwise it cancels the call."""
    async with grpc_live(engine=engine, pacing__itl_ns=5_000_000) as worker, smg(worker) as port:
        await worker.live.until(lambda: worker.live.states() == [])
        client = await RawClient.connect(port)
        client.send(request_bytes(PATH, CHAT | {"max_tokens": 20_000, "ignore_eos": True, "stream": stream}))
        await worker.live.until(lambda: worker.live.states() == ["decode"])
        if stream:
            await client.read_until(b'"content":"')
        client.leave("fin")
        await worker.live.until(lambda: worker.live.states() == [])
        await worker.live.until(lambda: len(worker.live.server.jobs) == 0)
        worker.live.server.engine.check_integrity()


async def test_statuses_come_through_the_router() -> None:
    async with grpc_live(scheduler__max_model_len=128) as worker, smg(worker) as port:
        too_long = CHAT | {"messages": [{"role": "user", "content": "word " * 500}]}
        status, _, body = await post(port, too_long)
        assert status == 400, body
        assert b"maximum context length" in body


async def test_the_cache_aware_policy_subscribes_to_the_workers_events(caplog: pytest.LogCaptureFixture) -> None:
    """And a conversation goes back to the worker whose cache holds it."""
    options = {"kv_events__enable_kv_cache_events": True, "kv_events__endpoint": "tcp://*:0"}
    caplog.set_level(logging.INFO, "windtunnel.serve")
    async with grpc_live(**options) as first, grpc_live(**options) as second, smg(first, second, policy="cache_aware") as port:
        for number in range(4):
            long = CHAT | {"messages": [{"role": "user", "content": f"conversation {number} " * 60}]}
            for _ in range(3):
                assert (await post(port, long))[0] == 200
        hits = [worker.live.gauge("vllm:prefix_cache_hits_total") for worker in (first, second)]
        queries = [worker.live.gauge("vllm:prefix_cache_queries_total") for worker in (first, second)]
        assert sum(hits) > sum(queries) / 2
    assert sum("subscribes" in record.message for record in caplog.records) >= 2


async def test_prefill_and_decode_of_sglang() -> None:
    """Both legs at once, with a room of 32 bits; a client that leaves frees both workers."""
    bootstrap = str(free_port())
    flags = ("--engine", "sglang", "--grpc-port", "0", "--itl", "2ms", "--disaggregation-mode")
    prefill = await start(*flags, "prefill", "--disaggregation-bootstrap-port", bootstrap)
    decode = await start(*flags, "decode")
    try:
        ports = [await grpc_port(process) for process in (prefill, decode)]
        urls = [f"grpc://127.0.0.1:{port}" for port in ports]
        pair = ("--pd-disaggregation", "--prefill", urls[0], bootstrap, "--decode", urls[1])
        async with grpc_live(engine="sglang") as unified, router(*pair, workers=2) as port:
            expected = text_of((await post(unified.live.port, CHAT | {"model": "m"}))[2])
            for stream in (False, True):
                assert text_of((await post(port, CHAT | {"model": "m", "stream": stream}))[2]) == expected
            client = await RawClient.connect(port)
            client.send(request_bytes(PATH, CHAT | {"model": "m", "max_tokens": 20_000, "stream": True}))
            await client.read_until(b'"content":"')
            client.leave("fin")
            for address in ports:
                await idle(address)
    finally:
        for process in (prefill, decode):
            process.kill()
            await process.wait()


async def test_prefill_and_decode_of_vllm() -> None:
    """The prefill first, then the decode with its parameters; a client that leaves a stream frees both workers."""
    nixl: dict[str, Any] = {"kv_transfer__told": NIXL, "kv_transfer__side_channel_port": 0}
    async with grpc_live(**nixl) as prefill, grpc_live(**nixl, pacing__itl_ns=2_000_000) as decode:
        pair = ("--pd-disaggregation", "--prefill", f"grpc://{prefill.address}", "none", "--decode", f"grpc://{decode.address}")
        async with router(*pair, workers=2) as port:
            expected = text_of((await post(decode.live.port, CHAT))[2])
            read = decode.live.gauge("vllm:nixl_xfer_time_seconds_count")
            for number, stream in enumerate((False, True)):
                long = CHAT | {"messages": [{"role": "user", "content": f"{number} [wt:7] " + "words before the answer " * 30}]}
                assert text_of((await post(port, long | {"stream": stream}))[2]) == expected
            assert decode.live.gauge("vllm:nixl_xfer_time_seconds_count") == read + 2
            client = await RawClient.connect(port)
            client.send(request_bytes(PATH, CHAT | {"max_tokens": 20_000, "ignore_eos": True, "stream": True}))
            await client.read_until(b'"content":"')
            client.leave("fin")
            for worker in (prefill, decode):
                await worker.live.until(lambda worker=worker: at_rest(worker.live))
                worker.live.server.engine.check_integrity()
                assert counters(worker.live) == {}


async def idle(port: int) -> None:
    """Until nothing runs, waits or is in flight on a worker."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        stub = rpc.SglangSchedulerStub(channel)
        while True:
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest(include=["core", "disagg"]))).loads
            if not load.num_total_reqs and not load.disaggregation.prefill_inflight_queue_reqs:
                return
            await asyncio.sleep(0.02)
