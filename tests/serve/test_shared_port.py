"""HTTP and gRPC on one port: both kinds of clients are served, leave and are limited there as on ports of their own."""

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tests.serve.grpc_live import GrpcServer, answer, completes, grpc_live, request, streamed_ids
from tests.serve.live import FOREVER_NS, PATIENCE_S, RawClient, request_bytes
from tests.serve.test_grpc_departure import PHASES, Relay, occupy
from tests.serve.test_grpc_process import grpc_port, start

from windtunnel.serve.config import UsageError
from windtunnel.serve.flags import parse_args
from windtunnel.serve.shared_port import PREFACE

SHARED = {"grpc_on_http_port": True}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_openai_and_grpc_clients_share_a_port_and_get_the_same_tokens(engine: str) -> None:
    import openai

    async with grpc_live(engine=engine, **SHARED) as server:
        assert server.front.port == 0
        async with openai.AsyncOpenAI(base_url=f"{server.live.url}/v1", api_key="x", timeout=PATIENCE_S) as client:
            stream = await client.completions.create(
                model="wt-model", prompt="one port [wt:51]", max_tokens=12, stream=True, extra_body={"ignore_eos": True}
            )
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        ids = await _grpc_tokens(server, "one port [wt:51]", 12)
        assert server.live.server.tokenizer.decode(ids).strip() == text.strip()


async def _grpc_tokens(server: GrpcServer, prompt: str, count: int) -> list[int]:
    if server.live.server.config.engine == "vllm":
        return streamed_ids(await answer(server, request(prompt, max_tokens=count)))
    from smg_grpc_proto.generated import sglang_scheduler_pb2 as scheduler

    told = scheduler.GenerateRequest(
        request_id="one",
        tokenized=scheduler.TokenizedInput(input_ids=server.live.server.tokenizer.encode(prompt)),
        sampling_params=scheduler.SamplingParams(max_new_tokens=count, ignore_eos=True),
        stream=True,
    )
    stream = server.stub.Generate(told, timeout=PATIENCE_S)
    return [token async for message in stream if message.HasField("chunk") for token in message.chunk.token_ids]


@pytest.mark.parametrize("mechanism", ["cancel", "channel", "dead"])
@pytest.mark.parametrize("phase", PHASES)
async def test_who_leaves_the_shared_port_frees_its_request_within_one_step(phase: str, mechanism: str) -> None:
    async with grpc_live(**PHASES[phase], **SHARED) as server:
        live = server.live
        if phase == "queued":
            await occupy(server)
        quiet = live.states()
        relay = await Relay.start(live.port)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}")
        call = rpc.VllmEngineStub(channel).Generate(request())
        await live.until(lambda: live.states() == [*quiet, phase])
        await live.until(lambda: live.published() == len(quiet) + 1)
        steps = live.server.driver.steps
        if mechanism == "cancel":
            call.cancel()
        elif mechanism == "channel":
            await channel.close()
        else:
            relay.cut()
        await live.until(lambda: live.states() == quiet)
        await live.until(lambda: live.server.driver.steps > steps)
        assert live.server.driver.steps == steps + 1
        await channel.close()
        await relay.stop()


async def test_an_http_client_leaves_the_shared_port_as_ever() -> None:
    async with grpc_live(pacing__itl_ns=FOREVER_NS, **SHARED) as server:
        client = await RawClient.connect(server.live.port)
        client.send(request_bytes("/v1/completions", {"model": "wt-model", "prompt": "a", "max_tokens": 9, "stream": True}))
        await server.live.until(lambda: server.live.states() == ["decode"])
        client.leave("rst")
        await server.live.until(lambda: server.live.states() == [])


async def test_first_bytes_may_come_one_by_one() -> None:
    """A head that begins like the preface is HTTP/1.1; the preface in pieces is HTTP/2, which answers with its settings."""
    async with grpc_live(**SHARED) as server:
        client = await RawClient.connect(server.live.port)
        for byte in b"PUT /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.read_all()).startswith(b"HTTP/1.1 405")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.live.port)
        for byte in PREFACE:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(bytes(3) + b"\x04\x00" + bytes(4))
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readexactly(9)
        assert head[3] == 4
        writer.close()


async def test_half_a_preface_is_cut_after_the_time_for_a_head() -> None:
    async with grpc_live(limits__head_timeout_ns=50_000_000, **SHARED) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.live.port)
        writer.write(PREFACE[:20])
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_grpc_connections_have_a_limit_and_http_is_not_counted_in() -> None:
    async with grpc_live(limits__connections=1, **SHARED) as server:
        assert completes(await answer(server, request(max_tokens=1)))
        async with grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        client = await RawClient.connect(server.live.port)
        client.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.read_all()).startswith(b"HTTP/1.1 200")


async def test_a_reader_that_never_reads_is_cut_on_the_shared_port_too() -> None:
    options = {"limits__write_deadline_ns": 200_000_000, "scheduler__max_model_len": 30_000, **SHARED}
    async with grpc_live(**options) as server:
        channel = grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        call = rpc.VllmEngineStub(channel).Generate(request(max_tokens=29_000, logprobs=20))
        await call.read()
        await server.live.until(lambda: len(server.live.server.jobs) == 0)
        assert server.live.states() == []
        assert completes(await answer(server, request(max_tokens=2)))
        call.cancel()
        await channel.close()


async def test_a_term_lets_streams_of_the_shared_port_end() -> None:
    process = await start("--grpc-on-http-port", "--itl", "20ms")
    port = await grpc_port(process, re.compile(rb"running on http://127.0.0.1:(\d+)"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        messages = []
        async for message in rpc.VllmEngineStub(channel).Generate(request(max_tokens=10), timeout=PATIENCE_S):
            if not messages:
                process.terminate()
            messages.append(message)
    assert completes(messages)[0].finish_reason == "length"
    async with asyncio.timeout(PATIENCE_S):
        _, rest = await process.communicate()
    assert process.returncode == 0, rest.decode()


async def test_a_folder_too_deep_for_a_socket_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(UsageError, match="TMPDIR"):
        async with grpc_live(**SHARED):
            pass


def test_the_flags_of_one_port() -> None:
    assert not parse_args(["m"]).config.grpc
    for args in (["--grpc-on-http-port"], ["--port", "50051", "--grpc"], ["--port", "7000", "--grpc-port", "7000"]):
        config = parse_args(["m", *args]).config
        assert (config.grpc_on_http_port, config.grpc_port, config.grpc) == (True, None, True)
    assert parse_args(["m", "--port", "0", "--grpc-port", "0"]).config.grpc_port == 0
    with pytest.raises(UsageError, match="--grpc-on-http-port and --grpc-port 5"):
        parse_args(["m", "--grpc-on-http-port", "--grpc-port", "5"])
    with pytest.raises(UsageError, match="no TLS"):
        parse_args(["m", "--grpc-on-http-port", "--ssl-certfile", "a", "--ssl-keyfile", "b"])
