"""`VllmEngine.Generate` and `Embed` over loopback: the same answers as HTTP, and a status for everything that is refused."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.serve.grpc_live import GrpcServer, answer, chunks, completes, grpc_live, request, streamed_ids
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, RawClient, request_bytes

from windtunnel.serve.clock import now_ns


async def http_choices(server: LiveServer, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    client = await RawClient.connect(server.port)
    told = {"model": "wt-model", "return_token_ids": True, **body}
    client.send(request_bytes(path, told, extra="Connection: close\r\n"))
    reply = await client.read_all()
    assert reply.startswith(b"HTTP/1.1 200"), reply
    choices: list[dict[str, Any]] = json.loads(reply.partition(b"\r\n\r\n")[2])["choices"]
    return choices


SAME = {
    "marker": {"prompt": "hello [wt:51]", "max_tokens": 20},
    "no marker": {"prompt": "what is the weather", "max_tokens": 20},
    "natural end": {"prompt": "end by yourself [wt:8]", "max_tokens": 1000},
    "choices": {"prompt": "three [wt:9]", "max_tokens": 12, "n": 3, "temperature": 0.8},
    "minimum": {"prompt": "[wt:4]", "max_tokens": 400, "min_tokens": 300},
    "seed and penalties": {
        "prompt": "many knobs [wt:6]",
        "max_tokens": 12,
        "seed": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
    },
    "stop": {"prompt": "[wt:5]", "max_tokens": 200, "stop": ["er", "x"]},
    "stop kept": {"prompt": "[wt:5]", "max_tokens": 200, "stop": ["er"], "include_stop_str_in_output": True},
    "stop after a minimum": {"prompt": "[wt:5]", "max_tokens": 200, "stop": ["e"], "min_tokens": 9},
    "stop tokens": {"prompt": "[wt:5]", "max_tokens": 300, "stop_token_ids": list(range(300, 600))},
    "truncated prompt": {"prompt": "words without a marker, rather many of them", "max_tokens": 9, "truncate_prompt_tokens": 3},
    "json object": {"prompt": "[wt:5]", "max_tokens": 200, "json_object": True},
    "grammar": {"prompt": "[wt:5]", "max_tokens": 200, "grammar": 'root ::= "yes" | "no"'},
    "structured choices": {"prompt": "[wt:5]", "max_tokens": 200, "regex": "[a-z]{4}", "n": 2, "temperature": 0.8},
    "regex": {"prompt": "[wt:5]", "max_tokens": 200, "regex": "[0-9]{8}"},
    "choice": {"prompt": "[wt:5]", "max_tokens": 200, "choice": ["yes", "no", "perhaps"]},
    "schema": {
        "prompt": "[wt:5]",
        "max_tokens": 200,
        "json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    },
}
KINDS = {"regex": "regex", "choice": "choice", "json_schema": "json", "json_object": "json_object", "grammar": "grammar"}


def as_http(told: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in told.items() if name not in KINDS}
    outputs = {KINDS[name]: value for name, value in told.items() if name in KINDS}
    return body | ({"structured_outputs": outputs} if outputs else {})


def as_grpc(told: dict[str, Any], *, stream: bool) -> pb.GenerateRequest:
    params = {name: value for name, value in told.items() if name != "prompt"}
    if "choice" in params:
        params["choice"] = pb.ChoiceConstraint(choices=params["choice"])
    return request(told["prompt"], stream=stream, ignore_eos=False, **params)


@pytest.mark.parametrize("name", SAME)
async def test_tokens_and_finish_reasons_are_those_of_http(name: str) -> None:
    async with grpc_live() as server:
        expected = await http_choices(server.live, as_http(SAME[name]))
        whole = completes(await answer(server, as_grpc(SAME[name], stream=False)))
        messages = await answer(server, as_grpc(SAME[name], stream=True))
    assert [list(one.output_ids) for one in whole] == [choice["token_ids"] for choice in expected]
    assert [one.finish_reason for one in whole] == [choice["finish_reason"] for choice in expected]
    ends = {one.index: one.finish_reason for one in completes(messages)}
    for at, choice in enumerate(expected):
        assert streamed_ids(messages, at) == choice["token_ids"]
        assert ends[at] == choice["finish_reason"]


async def test_token_ids_and_text_are_the_same_prompt() -> None:
    async with grpc_live() as server:
        ids = server.live.server.tokenizer.encode("hello [wt:51]")
        told = request("", stream=False, max_tokens=9)
        told.tokenized.input_ids.extend(ids)
        by_ids, by_text = await answer(server, told), await answer(server, request("hello [wt:51]", stream=False, max_tokens=9))
    assert completes(by_ids)[0].output_ids == completes(by_text)[0].output_ids
    assert completes(by_ids)[0].prompt_tokens == len(ids)


async def test_a_stream_has_a_chunk_for_each_token_and_counts_deltas() -> None:
    async with grpc_live(pacing__itl_ns=1_000_000) as server:
        messages = await answer(server, request(max_tokens=6))
    assert [len(chunk.token_ids) for chunk in chunks(messages)] == [1] * 6
    assert [chunk.completion_tokens for chunk in chunks(messages)] == [1] * 6
    (end,) = completes(messages)
    assert messages[-1].complete == end
    assert list(end.output_ids) == streamed_ids(messages)[-1:]
    assert (end.finish_reason, end.completion_tokens, end.prompt_tokens) == ("length", 1, chunks(messages)[0].prompt_tokens)


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with grpc_live(scheduler__max_model_len=64) as server:
        unlimited = completes(await answer(server, request(stream=False, max_tokens=None)))[0]
        beyond = completes(await answer(server, request(stream=False, max_tokens=10_000)))[0]
    assert unlimited.prompt_tokens + unlimited.completion_tokens == 64
    assert beyond.completion_tokens == unlimited.completion_tokens


async def test_cached_tokens_are_told() -> None:
    async with grpc_live() as server:
        told = request("word " * 100, max_tokens=2)
        first, second = await answer(server, told), await answer(server, told)
    assert chunks(first)[0].cached_tokens == 0
    assert chunks(second)[0].cached_tokens >= 64
    assert completes(second)[0].cached_tokens == chunks(second)[0].cached_tokens


async def test_stop_strings_and_stop_tokens() -> None:
    async with grpc_live() as server:
        plain = completes(await answer(server, request(stream=False, max_tokens=30)))[0]
        words = server.live.server.tokenizer.decode(list(plain.output_ids)).split()
        by_text = completes(await answer(server, request(stream=False, stop=[words[4]])))[0]
        streamed = await answer(server, request(stop=[words[4]]))
        by_token = completes(await answer(server, request(stream=False, stop_token_ids=[plain.output_ids[3]])))[0]
    assert by_text.finish_reason == "stop"
    assert by_text.matched_stop_str == words[4]
    assert list(by_text.output_ids) == list(plain.output_ids)[: len(by_text.output_ids)]
    assert streamed_ids(streamed) == list(by_text.output_ids)
    assert completes(streamed)[0].matched_stop_str == words[4]
    assert by_token.matched_token_id == plain.output_ids[3]
    assert list(by_token.output_ids) == list(plain.output_ids)[: len(by_token.output_ids)]
    assert plain.WhichOneof("matched_stop") is None


async def test_logprobs_are_those_of_http() -> None:
    async with grpc_live() as server:
        (choice,) = await http_choices(
            server.live, {"prompt": "storm [wt:7]", "max_tokens": 4, "logprobs": 3, "ignore_eos": True}
        )
        whole = completes(await answer(server, request(stream=False, max_tokens=4, logprobs=3)))[0].output_logprobs
        parts = [chunk.output_logprobs for chunk in chunks(await answer(server, request(max_tokens=4, logprobs=3)))]
        bare = completes(await answer(server, request(stream=False, max_tokens=4, logprobs=0)))[0].output_logprobs
    assert list(whole.token_logprobs) == pytest.approx(choice["logprobs"]["token_logprobs"])
    assert [len(top.token_ids) for top in whole.top_logprobs] == [3] * 4
    assert [top.token_ids[0] for top in whole.top_logprobs] == list(whole.token_ids) == choice["token_ids"]
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    assert (list(bare.token_ids), len(bare.top_logprobs)) == (choice["token_ids"], 0)


async def test_prompt_logprobs_come_with_the_first_chunk_of_a_choice() -> None:
    async with grpc_live() as server:
        told = request(max_tokens=3, prompt_logprobs=2, n=2, temperature=1.0)
        messages = await answer(server, told)
        ids = server.live.server.tokenizer.encode("storm [wt:7]")
    with_input = [chunk.index for chunk in chunks(messages) if chunk.HasField("input_logprobs")]
    assert sorted(with_input) == [0, 1]
    told_logprobs = chunks(messages)[0].input_logprobs
    assert list(told_logprobs.token_ids) == ids
    assert [one.HasField("value") for one in told_logprobs.token_logprobs] == [False] + [True] * (len(ids) - 1)
    assert len(told_logprobs.top_logprobs[1].values) == 2


BAD: dict[str, tuple[pb.GenerateRequest, str]] = {
    "no input": (pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=1)), "input"),
    "empty ids": (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "empty"),
    "unknown token": (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[4_000_000_000])), "vocabulary"),
    "prompt too long": (request("word " * 300), "maximum context length"),
    "temperature": (request(temperature=float("nan")), "temperature"),
    "top_p": (request(top_p=1.5), "top_p"),
    "min_p": (request(min_p=-0.5), "min_p"),
    "penalty": (request(presence_penalty=3.0), "presence_penalty"),
    "repetition": (request(repetition_penalty=-1.0), "repetition_penalty"),
    "max_tokens": (request(max_tokens=0), "max_tokens"),
    "min over max": (request(min_tokens=5, max_tokens=2), "min_tokens"),
    "greedy n": (request(n=2, temperature=0.0), "n must be 1"),
    "n": (request(n=1 << 31), "n must be at most"),
    "empty stop": (request(stop=[""]), "stop"),
    "many stops": (request(stop=["x"] * 2000), "stop"),
    "stop token": (request(stop_token_ids=[1 << 31]), "stop_token_ids"),
    "logit bias": (request(logit_bias={-5: 1.0}), "logit_bias"),
    "logprobs": (request(logprobs=21), "logprobs"),
    "negative logprobs": (request(logprobs=-2), "logprobs"),
    "prompt_logprobs": (request(prompt_logprobs=-7), "prompt_logprobs"),
    "truncate": (request(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
    "bad schema": (request(json_schema="{"), "JSON"),
    "bad regex": (request(regex="("), "regex"),
    "no choices": (request(choice=pb.ChoiceConstraint()), "Choice"),
    "rank": (pb.GenerateRequest(text="x", data_parallel_rank=3), "data_parallel_rank"),
    "kv not JSON": (pb.GenerateRequest(text="x", kv_transfer_params_json="{"), "kv_transfer_params_json"),
    "kv not an object": (pb.GenerateRequest(text="x", kv_transfer_params_json="[]"), "kv_transfer_params_json"),
    "kv without host": (pb.GenerateRequest(text="x", kv_transfer_params=pb.KvTransferParams(remote_port=1)), "remote_host"),
    "media": (pb.GenerateRequest(text="x", media_refs=pb.MediaRefs(items=[pb.MediaRef(url="data:x")])), "media_refs"),
}


async def refused(server: GrpcServer, told: pb.GenerateRequest, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(server, told, **options)
    return caught.value


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_bad_input_is_an_invalid_argument_that_names_its_field(stream: bool) -> None:
    async with grpc_live(scheduler__max_model_len=256) as server:
        for name, (told, word) in BAD.items():
            copy = pb.GenerateRequest()
            copy.CopyFrom(told)
            copy.stream = stream
            error = await refused(server, copy)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert word.lower() in (error.details() or "").lower(), (name, error.details())
        assert server.live.states() == []
        assert len(server.live.server.jobs) == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("rate_limit", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("invalid_api_key", grpc.StatusCode.UNAUTHENTICATED),
        ("server_error", grpc.StatusCode.UNAVAILABLE),
        ("model_not_found", grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_injected_failures_have_their_status(kind: str, code: grpc.StatusCode) -> None:
    async with grpc_live(failures__rate_percent=100, failures__types=(kind,)) as server:
        assert (await refused(server, request(max_tokens=1))).code() is code


async def test_metadata_asks_for_an_error() -> None:
    async with grpc_live() as server:
        error = await refused(server, request(max_tokens=1), metadata=(("x-return-error", "504"),))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_full_queue_is_unavailable() -> None:
    async with grpc_live(scheduler__max_num_queued_reqs=1, pacing__itl_ns=10**12) as server:
        held = server.stub.Generate(request())
        await server.live.until(lambda: server.live.states() == ["decode"])
        assert (await refused(server, request())).code() is grpc.StatusCode.UNAVAILABLE
        held.cancel()
        await server.live.until(lambda: server.live.states() == [])


async def test_a_message_over_the_limit_is_refused() -> None:
    async with grpc_live(limits__body_bytes=1024) as server:
        assert (await refused(server, request("x" * 4096))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert completes(await answer(server, request(max_tokens=2)))


async def test_the_engines_death_ends_a_stream_with_internal() -> None:
    async with grpc_live(pacing__itl_ns=10**12) as server:
        call = server.stub.Generate(request())
        assert (await call.read()).HasField("chunk")
        server.live.server.engine.kill(now_ns())
        server.live.server.driver.wake()
        async with asyncio.timeout(PATIENCE_S):
            assert await call.code() is grpc.StatusCode.INTERNAL
        assert not (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        assert (await refused(server, request())).code() is grpc.StatusCode.INTERNAL


async def test_embeddings_are_those_of_http() -> None:
    async with grpc_live(runner="pooling", convert="embed", embedding_size=64) as server:
        ids = server.live.server.tokenizer.encode("a vector")
        told = await server.stub.Embed(pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=ids)))
        client = await RawClient.connect(server.live.port)
        body = {"model": "wt-model", "input": "a vector"}
        client.send(request_bytes("/v1/embeddings", body, extra="Connection: close\r\n"))
        expected = json.loads((await client.read_all()).partition(b"\r\n\r\n")[2])["data"][0]["embedding"]
        assert list(told.embedding) == pytest.approx(expected, abs=1e-6)
        assert (told.prompt_tokens, told.embedding_dim) == (len(ids), 64)
        assert (await refused(server, request())).code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="tokenized"):
            await server.stub.Embed(pb.EmbedRequest())


async def test_a_client_that_leaves_an_embedding_frees_it() -> None:
    async with grpc_live(runner="pooling", convert="embed", pacing__ttft_ns=FOREVER_NS) as server:
        call = server.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[100, 101])))
        await server.live.until(lambda: server.live.states() == ["prefill"])
        call.cancel()
        await server.live.until(lambda: server.live.states() == [])
        await server.live.until(lambda: len(server.live.server.jobs) == 0)


async def test_a_rank_is_where_the_caller_sends_it() -> None:
    async with grpc_live(data_parallel_size=2, pacing__itl_ns=FOREVER_NS) as server:
        told = request()
        told.data_parallel_rank = 1
        call = server.stub.Generate(told)
        engines = server.live.server.engines
        await server.live.until(lambda: [len(list(engine.live())) for engine in engines] == [0, 1])
        call.cancel()
        await server.live.until(lambda: not list(engines[1].live()))


async def test_a_paused_engine_is_unavailable() -> None:
    async with grpc_live() as server:
        server.live.server.engine.control.paused = "abort"
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
        assert (await refused(server, request())).code() is grpc.StatusCode.UNAVAILABLE
        server.live.server.engine.control.paused = None
        assert completes(await answer(server, request(max_tokens=2)))


async def test_a_text_model_makes_no_embeddings() -> None:
    async with grpc_live() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[100])))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_prompt_is_planned_off_the_loop() -> None:
    async with grpc_live(scheduler__max_model_len=65536) as server:
        told = request("", stream=False, max_tokens=2)
        told.tokenized.input_ids.extend(100 + number % 400 for number in range(40_000))
        first, again = await answer(server, told), await answer(server, told)
        assert server.live.server.planner.off_loop == 2
        assert [end.cached_tokens for end in (*completes(first), *completes(again))] == [0, 39_984]
