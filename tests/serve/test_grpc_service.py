"""The other methods of `VllmEngine`, health, reflection, the graceful stop, and what a server without gRPC does not pay."""

import asyncio
import contextlib
import hashlib
import io
import subprocess
import sys
import zipfile

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc, vllm_engine_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.serve.golden import FOLDER, needs_golden
from tests.serve.grpc_live import GrpcServer, answer, completes, grpc_live, request
from tests.serve.live import PATIENCE_S

from windtunnel.serve.clock import now_ns
from windtunnel.wire.builtin_files import tokenizer_files

SERVICE = "vllm.grpc.engine.VllmEngine"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
HELD_NS = 10**12


async def status(server: GrpcServer, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)).status)


async def test_health_of_the_server_and_of_the_service() -> None:
    async with grpc_live() as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        assert [await status(server, name) for name in ("", SERVICE)] == [SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(server, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watched = [told.status async for told in stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))]
        assert watched == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]
        server.live.server.engine.kill(now_ns())
        assert await status(server, SERVICE) == NOT_SERVING
        assert not (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_another_engines_service_is_unimplemented() -> None:
    """How smg finds out which engine a worker runs (clients.md §4.2)."""
    async with grpc_live() as server:
        other = sglang_scheduler_pb2_grpc.SglangSchedulerStub(server.channel)
        from smg_grpc_proto.generated import sglang_scheduler_pb2

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_names_the_services_and_describes_them() -> None:
    async with grpc_live() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = [told async for told in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert vllm_engine_pb2.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


async def test_every_method_of_the_service_is_known() -> None:
    """What is not simulated says so in words of its own, and is in docs/grpc.md."""
    async with grpc_live() as server:
        missing = []
        for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods:
            call = server.channel.unary_stream(f"/{SERVICE}/{method.name}")(b"", timeout=PATIENCE_S)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            if await call.code() is grpc.StatusCode.UNIMPLEMENTED:
                missing.append((method.name, await call.details()))
    assert [name for name, _ in missing] == ["SubscribeKvEvents"]
    assert "KV cache events" in missing[0][1]


async def test_model_and_server_info() -> None:
    options = {"scheduler__max_model_len": 512, "scheduler__max_num_seqs": 7, "served_model_names": ("public", "alias")}
    async with grpc_live(**options) as server:
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        tokenizer = server.live.server.tokenizer
    assert (model.model_path, model.served_model_name, model.is_generation) == ("wt-model", "public", True)
    assert (model.max_context_length, model.vocab_size) == (512, tokenizer.vocab_size)
    assert list(model.eos_token_ids) == [tokenizer.eos_token_id]
    assert (info.server_type, info.max_num_seqs, info.block_size, info.data_parallel_size) == ("vllm-grpc", 7, 16, 1)
    assert (info.kv_connector, info.kv_role, info.is_paused, info.active_requests) == ("", "", False, 0)


async def test_loads_follow_the_last_step() -> None:
    async with grpc_live(scheduler__max_num_seqs=1, pacing__itl_ns=HELD_NS) as server:
        (idle,) = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (idle.num_running_reqs, idle.num_waiting_reqs, idle.max_running_requests) == (0, 0, 1)
        calls = [server.stub.Generate(request("word " * 40))]
        await server.live.until(lambda: server.live.states() == ["decode"])
        calls.append(server.stub.Generate(request("other " * 40)))
        await server.live.until(lambda: server.live.published() == 2)
        told = await server.stub.GetLoads(pb.GetLoadsRequest(include=["core", "disagg", "queues", "memory"]))
        (load,) = told.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert load.token_usage == load.utilization == server.live.gauge("vllm:kv_cache_usage_perc") > 0
        assert load.num_used_tokens == round(load.token_usage * load.max_total_num_tokens)
        assert load.num_waiting_uncached_tokens > 0
        for call in calls:
            call.cancel()
        await server.live.until(lambda: server.live.states() == [])


async def test_flush_cache() -> None:
    async with grpc_live(pacing__itl_ns=HELD_NS) as server:
        call = server.stub.Generate(request("word " * 40))
        await server.live.until(lambda: server.live.states() == ["decode"])
        assert not (await server.stub.FlushCache(common.FlushCacheRequest())).success
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.FlushCache(common.FlushCacheRequest(timeout_s=0.05))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.ensure_future(server.stub.FlushCache(common.FlushCacheRequest(timeout_s=PATIENCE_S)))
        call.cancel()
        assert (await waiting).success
        assert server.live.server.engine.cached_hashes == frozenset()
        for bad in (-1.0, float("inf")):
            with pytest.raises(grpc.aio.AioRpcError, match="timeout_s"):
                await server.stub.FlushCache(common.FlushCacheRequest(timeout_s=bad))


async def test_the_profiler() -> None:
    async with grpc_live(profiler_config="on") as server:
        assert (await server.stub.StartProfile(common.StartProfileRequest())).success
        assert server.live.server.operator.profiling
        with pytest.raises(grpc.aio.AioRpcError, match="already running"):
            await server.stub.StartProfile(common.StartProfileRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="output_dir"):
            await server.stub.StartProfile(common.StartProfileRequest(output_dir="x"))
        assert (await server.stub.StopProfile(common.StopProfileRequest())).success
    async with grpc_live() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.StartProfile(common.StartProfileRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def files_of(server: GrpcServer) -> dict[str, bytes]:
    """The tokenizer's files; checks pieces and digest."""
    told = [piece async for piece in server.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=PATIENCE_S)]
    data = b"".join(piece.data for piece in told)
    assert [bool(piece.sha256) for piece in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@needs_golden
async def test_the_tokenizers_folder_is_sent() -> None:
    async with grpc_live(tokenizer=str(FOLDER)) as server:
        files = await files_of(server)
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert files["tokenizer.json"] == (FOLDER / "tokenizer.json").read_bytes()
    assert {"tokenizer_config.json", "chat_template.jinja"} <= files.keys()
    assert not any(name.endswith(".jsonl") for name in files)
    assert model.tokenizer_path == str(FOLDER)


async def test_the_built_in_tokenizer_is_sent_as_files() -> None:
    async with grpc_live() as server:
        files = await files_of(server)
    assert files == dict(tokenizer_files())


async def test_a_stop_lets_calls_end_and_takes_no_more() -> None:
    async with grpc_live(pacing__itl_ns=20_000_000) as server:
        messages = []
        async for message in server.stub.Generate(request(max_tokens=5)):
            if not messages:
                stopping = asyncio.ensure_future(server.front.stop(PATIENCE_S))
            messages.append(message)
        assert completes(messages)[0].finish_reason == "length"
        await stopping
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(server, request(max_tokens=1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_after_the_grace_calls_are_cancelled_and_the_engine_is_free() -> None:
    async with grpc_live(pacing__itl_ns=HELD_NS) as server:
        call = server.stub.Generate(request())
        await call.read()
        await server.front.stop(0.05)
        await server.live.until(lambda: server.live.states() == [])
        assert await call.code() is not grpc.StatusCode.OK


async def test_health_says_not_serving_while_the_server_stops() -> None:
    async with grpc_live(pacing__itl_ns=HELD_NS) as server:
        call = server.stub.Generate(request())
        await call.read()
        stopping = asyncio.ensure_future(server.front.stop(PATIENCE_S))
        await server.live.until(lambda: server.front._health.stopping)
        told = await server.front._health.Check(health_pb2.HealthCheckRequest(), None)
        assert told.status == NOT_SERVING
        call.cancel()
        await stopping


def test_without_the_flag_no_server_imports_grpc() -> None:
    code = "import sys, windtunnel.serve.server; print([name for name in ('grpc', 'google.protobuf') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"
