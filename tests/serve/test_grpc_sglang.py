"""`SglangScheduler` over loopback: the same answers as `/generate`, statuses, departures, aborts, loads, adapters."""

import contextlib
import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as rpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_rpc
from tests.serve.grpc_live import GrpcServer, answer, arrived, chunks, completes, grpc_live, streamed_ids
from tests.serve.live import FOREVER_NS, PATIENCE_S, RawClient, request_bytes

from windtunnel.core.tokenizer import BuiltinTokenizer

SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"]
TOKENIZER = BuiltinTokenizer()
PHASES = {
    "queued": {"sglang__max_running_requests": 1, "pacing__ttft_ns": FOREVER_NS},
    "prefill": {"pacing__ttft_ns": FOREVER_NS},
    "decode": {"pacing__itl_ns": 5_000_000},
}
"""A running batch ends before an abort takes effect (SGLang reference §5), so that of `decode` must end."""


STEPS_TO_FREE = 2
"""The one at work, which ends, and the one that takes the abort."""


def sglang(**values: Any) -> Any:
    return grpc_live(engine="sglang", **values)


def request(text: str = "storm [wt:7]", *, stream: bool = True, request_id: str = "", **options: Any) -> pb.GenerateRequest:
    """Endless unless `max_new_tokens` says otherwise. Options are sampling parameters, or members of the request."""
    members = {name: options.pop(name) for name in list(options) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    told = {"ignore_eos": True, "max_new_tokens": 20_000, "temperature": 1.0, **options}
    params = pb.SamplingParams(**{name: value for name, value in told.items() if value is not None})
    ids = pb.TokenizedInput(input_ids=TOKENIZER.encode(text))
    return pb.GenerateRequest(request_id=request_id, tokenized=ids, stream=stream, sampling_params=params, **members)


async def native(server: GrpcServer, body: dict[str, Any]) -> Any:
    client = await RawClient.connect(server.live.port)
    client.send(request_bytes("/generate", body, extra="Connection: close\r\n"))
    reply = await client.read_all()
    assert reply.startswith(b"HTTP/1.1 200"), reply
    told = json.loads(reply.partition(b"\r\n\r\n")[2])
    return told if isinstance(told, list) else [told]


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "marker": ("hello [wt:51]", {"max_new_tokens": 20}),
    "no marker": ("what is the weather", {"max_new_tokens": 20}),
    "natural end": ("end by yourself [wt:8]", {"max_new_tokens": 1000}),
    "choices": ("three [wt:9]", {"max_new_tokens": 12, "n": 3}),
    "minimum": ("[wt:4]", {"max_new_tokens": 400, "min_new_tokens": 300}),
    "regex": ("[wt:5]", {"max_new_tokens": 200, "regex": "[0-9]{8}"}),
    "schema": (
        "[wt:5]",
        {
            "max_new_tokens": 200,
            "json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
        },
    ),
    "structured choices": ("[wt:5]", {"max_new_tokens": 200, "regex": "[a-z]{4}", "n": 2}),
    "stop kept": ("[wt:5]", {"max_new_tokens": 200, "stop": ["er"], "no_stop_trim": True}),
    "stop tokens": ("[wt:5]", {"max_new_tokens": 300, "stop_token_ids": list(range(300, 600))}),
    "penalties": (
        "many knobs [wt:6]",
        {"max_new_tokens": 12, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ),
    "stop": ("[wt:5]", {"max_new_tokens": 200, "stop": ["e"]}),
}


@pytest.mark.parametrize("name", SAME)
async def test_tokens_and_finish_reasons_are_those_of_http(name: str) -> None:
    text, params = SAME[name]
    async with sglang() as server:
        ids = TOKENIZER.encode(text)
        expected = await native(server, {"input_ids": ids, "sampling_params": {**params, "temperature": 1.0}})
        whole = completes(await answer(server, request(text, stream=False, ignore_eos=False, **params)))
        messages = await answer(server, request(text, ignore_eos=False, **params))
    assert [list(one.output_ids) for one in whole] == [choice["output_ids"] for choice in expected]
    reasons = [choice["meta_info"]["finish_reason"]["type"] for choice in expected]
    assert [one.finish_reason for one in whole] == reasons
    for at, choice in enumerate(expected):
        assert streamed_ids(messages, at) == choice["output_ids"]
        counted = [chunk.completion_tokens for chunk in chunks(messages) if chunk.index == at]
        assert counted[-1] == len(choice["output_ids"])
        assert counted == sorted(counted)
    assert {one.index: one.finish_reason for one in completes(messages)} == dict(enumerate(reasons))
    if name == "stop":
        assert whole[0].matched_stop_str == "e"


async def test_logprobs_are_those_of_http() -> None:
    async with sglang() as server:
        ids = TOKENIZER.encode("storm [wt:7]")
        asked = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, **asked}
        (expected,) = await native(server, body)
        (one,) = completes(await answer(server, request(stream=False, max_new_tokens=4, **asked)))
        streamed = chunks(await answer(server, request(max_new_tokens=4, **asked)))
        bare = completes(await answer(server, request(stream=False, max_new_tokens=4)))[0]
    told = expected["meta_info"]
    assert list(one.output_logprobs.token_logprobs) == pytest.approx([row[0] for row in told["output_token_logprobs"]])
    assert [len(top.values) for top in one.output_logprobs.top_logprobs] == [2] * 4
    assert list(one.input_logprobs.token_ids) == ids
    values = [row.value if row.HasField("value") else None for row in one.input_logprobs.token_logprobs]
    assert values[0] is None
    assert values[1:] == pytest.approx([row[0] for row in told["input_token_logprobs"]][1:])
    assert [chunk.HasField("input_logprobs") for chunk in streamed] == [True, False, False, False]
    assert not bare.HasField("output_logprobs")


def brief(**options: Any) -> pb.GenerateRequest:
    return request(max_new_tokens=8, **options)


BAD: dict[str, tuple[pb.GenerateRequest, str]] = {
    "no input": (pb.GenerateRequest(), "tokenized"),
    "empty": (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "empty"),
    "unknown token": (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[4_000_000_000])), "input_ids"),
    "too long": (request("word " * 300), "context length"),
    "too many": (request(max_new_tokens=255), "context length"),
    "no tokens": (request(max_new_tokens=0), "max_new_tokens"),
    "temperature": (brief(temperature=-1.0), "temperature"),
    "top_k": (brief(top_k=-5), "top_k"),
    "n": (brief(n=5000), "n must be"),
    "stops": (brief(stop=["x"] * 2000), "stop"),
    "interval": (brief(stream_interval=0), "stream_interval"),
    "regex": (brief(regex="("), "regex"),
    "top": (brief(top_logprobs_num=-1), "top_logprobs_num"),
    "rank": (brief(data_parallel_rank=4), "data_parallel_rank"),
    "adapter": (brief(lora_id="nobody"), "nobody"),
    "port": (brief(disaggregated_params=pb.DisaggregatedParams(bootstrap_host="h", bootstrap_port=-1)), "bootstrap_port"),
    "media": (brief(mm_inputs=pb.MultimodalInputs(image_urls=["x"])), "mm_inputs"),
    "embeds": (brief(input_embeds=[1.0]), "input_embeds"),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_bad_input_is_an_invalid_argument_that_names_its_field(stream: bool) -> None:
    async with sglang(scheduler__max_model_len=256) as server:
        for name, (told, word) in BAD.items():
            copy = pb.GenerateRequest()
            copy.CopyFrom(told)
            copy.stream = stream
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(server, copy)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, caught.value)
            assert word in (caught.value.details() or ""), (name, caught.value.details())
        assert len(server.live.server.jobs) == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("mechanism", ["cancel", "deadline", "channel"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_frees_its_request(phase: str, mechanism: str, stream: bool) -> None:
    async with sglang(**PHASES[phase]) as server:
        live, held = server.live, None
        if phase == "queued":
            held = server.stub.Generate(request())
            await live.until(lambda: len(live.states()) == 1 and live.states() != ["queued"])
        quiet = live.states()
        channel = grpc.aio.insecure_channel(server.address)
        call = await arrived(
            live,
            lambda timeout: rpc.SglangSchedulerStub(channel).Generate(request(stream=stream), timeout=timeout),
            0.25 if mechanism == "deadline" else None,
            lambda: len(live.states()) == len(quiet) + 1,
        )
        if mechanism == "cancel":
            call.cancel()
        elif mechanism == "channel":
            await channel.close()
        await live.until(lambda: len(live.server.jobs) == len(quiet))
        steps = live.server.driver.steps
        if phase != "prefill":
            await live.until(lambda: live.states() == quiet)
            assert live.server.driver.steps - steps <= STEPS_TO_FREE
        await channel.close()
        del held


async def test_abort_ends_the_stream_and_matches_by_prefix() -> None:
    async with sglang(pacing__itl_ns=5_000_000) as server:
        calls = {name: server.stub.Generate(request(request_id=name), timeout=PATIENCE_S) for name in ("a", "a-1", "b")}
        await server.live.until(lambda: len(server.live.states()) == 3)
        told = await server.stub.Abort(pb.AbortRequest(request_id="a", reason="Stream dropped"))
        assert told.success
        for name in ("a", "a-1"):
            assert completes([message async for message in calls[name]])[0].finish_reason == "abort"
        assert len(server.live.states()) == 1
        assert (await server.stub.Abort(pb.AbortRequest(request_id="nobody"))).success
        assert not (await server.stub.Abort(pb.AbortRequest(request_id="HEALTH_CHECK_1"))).success
        await server.stub.Abort(pb.AbortRequest())
        assert len(server.live.states()) == 1
        calls["b"].cancel()
        await server.live.until(lambda: server.live.states() == [])


async def test_an_id_that_is_live_is_refused() -> None:
    async with sglang(pacing__itl_ns=FOREVER_NS) as server:
        call = server.stub.Generate(request(request_id="a"))
        await server.live.until(lambda: len(server.live.states()) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(server, request(request_id="a"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call.cancel()


async def test_health_models_arguments_and_loads() -> None:
    async with sglang(scheduler__max_model_len=512, sglang__max_running_requests=7) as server:
        assert (await server.stub.HealthCheck(pb.HealthCheckRequest(), timeout=PATIENCE_S)).healthy
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        told = await server.stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues", "disagg", "memory"]))
        await server.live.until(lambda: server.live.states() == [])
        assert (await server.stub.FlushCache(common.FlushCacheRequest())).success
        with pytest.raises(grpc.aio.AioRpcError, match="include"):
            await server.stub.GetLoads(pb.GetLoadsRequest(include=["nothing"]))
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("wt-model", 512, True)
    arguments = json_format.MessageToDict(info.server_args)
    assert (arguments["max_running_requests"], arguments["disaggregation_mode"]) == (7, "null")
    assert (info.server_type, info.max_total_num_tokens > 0) == ("grpc", True)
    (load,) = told.loads
    assert (load.max_running_requests, load.disaggregation.mode, load.queues.waiting) == (7, "null", 0)
    assert load.HasField("memory") and not load.HasField("lora")


async def test_adapters_have_the_ids_that_callers_gave_them() -> None:
    async with sglang(enable_lora=True) as server:
        asked = pb.LoadLoRAAdapterRequest(lora_name="poet", lora_path="/adapters/poet", lora_id="id-1", pinned=True)
        assert list((await server.stub.LoadLoRAAdapter(asked)).loaded_lora_ids) == ["id-1"]
        assert not (await server.stub.LoadLoRAAdapter(asked)).success
        listed = (await server.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())).loaded_adapters
        assert [(one.lora_id, one.lora_name, one.pinned) for one in listed] == [("id-1", "poet", True)]
        assert completes(await answer(server, request(max_new_tokens=2, lora_id="id-1")))
        wrong = pb.UnloadLoRAAdapterRequest(lora_name="poet", lora_id="id-2")
        assert not (await server.stub.UnloadLoRAAdapter(wrong)).success
        gone = await server.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name="poet", lora_id="id-1"))
        assert (gone.success, list(gone.loaded_lora_ids)) == (True, [])


async def test_abort_ends_a_queued_stream_and_a_whole_answer() -> None:
    async with sglang(sglang__max_running_requests=1, pacing__itl_ns=5_000_000) as server:
        first = server.stub.Generate(request(request_id="first", stream=False), timeout=PATIENCE_S)
        await server.live.until(lambda: len(server.live.states()) == 1 and server.live.states() != ["queued"])
        second = server.stub.Generate(request(request_id="second"), timeout=PATIENCE_S)
        await server.live.until(lambda: len(server.live.states()) == 2)
        await server.stub.Abort(pb.AbortRequest(request_id="second"))
        (end,) = completes([message async for message in second])
        assert (end.finish_reason, list(end.output_ids)) == ("abort", [])
        await server.stub.Abort(pb.AbortRequest(request_id="first"))
        (whole,) = completes([message async for message in first])
        assert (whole.finish_reason, len(whole.output_ids) > 0) == ("abort", True)
        await server.live.until(lambda: server.live.states() == [])


async def test_every_method_of_the_service_is_known() -> None:
    async with sglang() as server:
        missing = []
        for method in SERVICE.methods:
            call = server.channel.unary_stream(f"/{SERVICE.full_name}/{method.name}")(b"", timeout=PATIENCE_S)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            if await call.code() is grpc.StatusCode.UNIMPLEMENTED:
                missing.append((method.name, await call.details()))
    assert [name for name, _ in missing] == ["SubscribeKvEvents"]
    assert "not served over gRPC" in missing[0][1]


async def test_what_stands_beside_the_service() -> None:
    """Health, reflection, the tokenizer's files, the profiler, no vectors, and the other engine's service."""
    async with sglang() as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        for name in ("", SERVICE.full_name):
            told = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
            assert told.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name)
        reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        (described,) = [one async for one in reflection.ServerReflectionInfo(iter([asked]))]
        assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
        assert [piece async for piece in server.stub.GetTokenizer(common.GetTokenizerRequest())][-1].sha256
        assert (await server.stub.StartProfile(common.StartProfileRequest())).success
        assert (await server.stub.StopProfile(common.StopProfileRequest())).success
        for call, code in (
            (server.stub.Embed(pb.EmbedRequest()), grpc.StatusCode.INVALID_ARGUMENT),
            (vllm_rpc.VllmEngineStub(server.channel).HealthCheck(vllm_pb.HealthCheckRequest()), grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is code


async def status_of(server: GrpcServer, told: pb.GenerateRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(server, told)
    return caught.value.code()


async def test_statuses_of_limits_and_failures() -> None:
    async with sglang(limits__body_bytes=1024) as server:
        assert await status_of(server, request("x" * 9000)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with sglang(failures__rate_percent=100, failures__types=("server_error",)) as server:
        assert await status_of(server, brief()) is grpc.StatusCode.UNAVAILABLE
    options = {"sglang__max_queued_requests": 1, "sglang__max_running_requests": 1, "pacing__itl_ns": 5_000_000}
    async with sglang(**options) as server:
        held = server.stub.Generate(request())
        await server.live.until(lambda: len(server.live.states()) == 1 and server.live.states() != ["queued"])
        queued = server.stub.Generate(request())
        await server.live.until(lambda: len(server.live.states()) == 2)
        assert await status_of(server, request()) is grpc.StatusCode.UNAVAILABLE
        queued.cancel()
        held.cancel()
        await server.live.until(lambda: server.live.states() == [])


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_after_the_grace_calls_are_cancelled_and_the_engine_is_free() -> None:
    async with sglang(pacing__itl_ns=5_000_000) as server:
        call = server.stub.Generate(request(max_new_tokens=20_000))
        await call.read()
        await server.front.stop(0.05)
        await server.live.until(lambda: server.live.states() == [])
        with pytest.raises(grpc.aio.AioRpcError):
            await _read_on(call)
