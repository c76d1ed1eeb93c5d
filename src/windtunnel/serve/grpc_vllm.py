"""`vllm.grpc.engine.VllmEngine` over the same jobs and the same engine as HTTP (vLLM reference §8).

A cancelled call, a passed deadline and a vanished client all cancel the method's task: that is the departure of the client, and
aborts its requests in the engine at once. `Abort` ends a stream from the server's side, with a `complete` that says `abort`.
"""

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from windtunnel.core.outputs import Refusal
from windtunnel.serve.clock import now_ns
from windtunnel.serve.failures import RETURN_ERROR
from windtunnel.serve.fetched import FetchedAnswer
from windtunnel.serve.generate import Departure, End, planned, refused
from windtunnel.serve.grpc_front import Method
from windtunnel.serve.jobs import Job
from windtunnel.serve.loads import LoadObserver
from windtunnel.serve.seams import log_disconnect
from windtunnel.serve.streams import Answer, CollectedAnswer
from windtunnel.wire import grpc_vllm as wire
from windtunnel.wire.family import Generation, Usage, WireError
from windtunnel.wire.output import ChoiceState

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]

_FLUSH_RETRY_S = 0.1
_NO_BODY = b"{}"
"""Recorded answers to a whole HTTP body never match a message; those to a prompt do."""


def methods(server: "Server") -> Mapping[str, Method]:
    """The table of methods. Load reports need to see the engine's steps from the start."""
    loads = LoadObserver()
    server.driver.observe(loads)
    started_s = time.monotonic()
    return {
        "Generate": _generate,
        "Embed": _embed,
        "HealthCheck": _health_check,
        "Abort": _abort,
        "GetModelInfo": _model_info,
        "GetServerInfo": partial(_server_info, started_s),
        "GetLoads": partial(_loads, loads),
        "FlushCache": _flush_cache,
        "StartProfile": _start_profile,
        "StopProfile": _stop_profile,
        "GetTokenizer": _tokenizer,
        "SubscribeKvEvents": _subscribe_kv_events,
    }


async def _generate(server: "Server", request: pb.GenerateRequest, call: Any) -> None:
    if server.config.runner != "generate":
        raise WireError("This model makes vectors, not text: call Embed")
    arrival_ns = now_ns()
    _inject_failure(server, call)
    generation = await planned(server, request.ByteSize(), partial(wire.plan, request, server.env))
    if server.recorded:
        generation = server.recorded.attach(generation, _NO_BODY)
    server.load += 1
    try:
        await (_stream if generation.stream else _whole)(server, generation, arrival_ns, call)
    finally:
        server.load -= 1


async def _stream(server: "Server", generation: Generation, arrival_ns: int, call: Any) -> None:
    choices = _choices(server, generation, keep=False)
    answer = FetchedAnswer(choices, _usage(generation), server.loop, _counted(generation))
    job, leave = _started(server, generation, answer, choices, arrival_ns, End(server.loop))
    encoder, deadline_s = wire.GenerateEncoder(generation.spec), server.config.limits.write_deadline_ns / 1e9
    try:
        while await answer.more():
            while (delta := answer.take()) is not None:
                for message in encoder.messages(delta, answer.usage):
                    await _write(call, message, deadline_s)
    finally:
        leave()
        server.jobs.end(job)
    if answer.error is not None:
        raise answer.error


async def _write(call: Any, message: pb.GenerateResponse, deadline_s: float) -> None:
    """Hand one message to the transport; waits while the reader is slow. Raises WireError when that takes too long."""
    try:
        async with asyncio.timeout(deadline_s):
            await call.write(message)
    except TimeoutError:
        raise WireError(f"The client has not read for {deadline_s:g} s", 429) from None


async def _whole(server: "Server", generation: Generation, arrival_ns: int, call: Any) -> None:
    """One `complete` for each choice."""
    answer = await _collected(server, generation, arrival_ns)
    for result in answer.results():
        message = wire.complete(generation.spec, result, answer.usage)
        await _write(call, message, server.config.limits.write_deadline_ns / 1e9)


async def _collected(server: "Server", generation: Generation, arrival_ns: int) -> CollectedAnswer:
    """The finished answer. Raises the WireError with which it ended."""
    end = End(server.loop)
    choices = _choices(server, generation, keep=True)
    answer = CollectedAnswer(choices, _usage(generation), end.set, _counted(generation))
    job, leave = _started(server, generation, answer, choices, arrival_ns, end)
    try:
        await end.future
    finally:
        leave()
        server.jobs.end(job)
    if answer.error is not None:
        raise answer.error
    return answer


def _started(
    server: "Server", generation: Generation, answer: Answer, choices: Sequence[ChoiceState], arrival_ns: int, end: End
) -> tuple[Job, Departure]:
    """The job at work, and what to do when its client leaves. Raises WireError when the engine refuses it."""
    job = server.jobs.start(generation, answer, choices, arrival_ns)
    if isinstance(job, Refusal):
        raise refused(job)
    return job, Departure(server, job, answer, end, log_disconnect)


def _choices(server: "Server", generation: Generation, *, keep: bool) -> list[ChoiceState]:
    interval, tokenizer = generation.stream_interval, server.env.tokenizer
    return [
        ChoiceState(child, 0, generation.sampling, tokenizer, keep=keep, stream_interval=interval)
        for child in range(generation.sampling.n)
    ]


def _usage(generation: Generation) -> Usage:
    return Usage(len(generation.prompts[0].token_ids), 0, generation.recorded_cached_tokens or 0)


def _counted(generation: Generation) -> range:
    """A recording that fixes the cached tokens fixes those of the one prompt."""
    return range(generation.recorded_cached_tokens is not None)


def _inject_failure(server: "Server", call: Any) -> None:
    metadata = {key: value for key, value in call.invocation_metadata() or () if key == RETURN_ERROR}
    server.inject_failure(metadata.get(RETURN_ERROR))


async def _embed(server: "Server", request: pb.EmbedRequest, call: Any) -> pb.EmbedResponse:
    if server.config.runner != "pooling" or server.env.pooling_task != "embed":
        raise WireError("This model makes no embeddings: start the server with --runner pooling --convert embed")
    arrival_ns = now_ns()
    _inject_failure(server, call)
    generation = wire.plan_embedding(request, server.env)
    await _collected(server, generation, arrival_ns)
    return wire.embedding(generation)


async def _health_check(server: "Server", _request: Any, _call: Any) -> pb.HealthCheckResponse:
    """Looks at a flag only, as over HTTP: a frozen engine stays healthy."""
    return pb.HealthCheckResponse(healthy=not server.dead, message="Engine is not alive" if server.dead else "Health")


async def _abort(server: "Server", request: pb.AbortRequest, _call: Any) -> pb.AbortResponse:
    """Unknown and finished ids are ignored; no ids abort nothing."""
    server.jobs.abort_by_id(request.request_ids)
    return pb.AbortResponse()


async def _model_info(server: "Server", _request: Any, _call: Any) -> pb.GetModelInfoResponse:
    config, env = server.config, server.env
    defaults = {name: value for name, value in env.default_sampling.items() if name != "max_tokens"}
    return pb.GetModelInfoResponse(
        model_path=config.model,
        is_generation=config.runner == "generate",
        max_context_length=env.max_model_len,
        vocab_size=env.vocabulary,
        served_model_name=env.served_models[0],
        tokenizer_path=config.tokenizer or config.model,
        model_type="windtunnel",
        architectures=["WindtunnelForCausalLM"],
        eos_token_ids=[env.tokenizer.eos_token_id, *env.extra_eos_token_ids],
        max_req_input_len=env.max_model_len,
        default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "",
    )


async def _server_info(started_s: float, server: "Server", _request: Any, _call: Any) -> pb.GetServerInfoResponse:
    """No P/D connector, no media."""
    config = server.config
    return pb.GetServerInfoResponse(
        active_requests=len(server.jobs),
        is_paused=server.engine.control.paused is not None,
        uptime_seconds=time.monotonic() - started_s,
        server_type="vllm-grpc",
        data_parallel_size=server.env.data_parallel_size,
        kv_cache_dtype="auto",
        block_size=config.scheduler.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        engine_reasoning_parser=config.reasoning_parser or "",
        constrained_decoding_start="first_token",
    )


async def _loads(loads: LoadObserver, server: "Server", _request: Any, _call: Any) -> pb.GetLoadsResponse:
    """One entry for each rank, core numbers only, whatever `include` says (smg-grpc-servicer 0.14.1)."""
    scheduler = server.config.scheduler
    capacity = scheduler.num_gpu_blocks * scheduler.block_size
    waiting = [view.prompt_tokens for view in server.engine.live() if view.computed_tokens == 0 and view.output_tokens == 0]
    entries = [
        pb.SchedulerLoad(
            dp_rank=rank,
            num_running_reqs=report.running,
            num_waiting_reqs=report.waiting,
            num_total_reqs=report.running + report.waiting,
            num_used_tokens=round(report.kv_usage * capacity),
            max_total_num_tokens=capacity,
            token_usage=report.kv_usage,
            gen_throughput=report.tokens_per_s,
            cache_hit_rate=report.hit_rate,
            utilization=report.kv_usage,
            max_running_requests=scheduler.max_num_seqs,
            num_waiting_uncached_tokens=round(sum(waiting) * (1 - report.hit_rate)),
        )
        for rank, report in loads.reports(now_ns())
    ]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return pb.GetLoadsResponse(timestamp=stamp, version=server.config.vllm_version, dp_rank_count=len(entries), loads=entries)


async def _flush_cache(server: "Server", request: common.FlushCacheRequest, _call: Any) -> common.FlushCacheResponse:
    """Without a time to wait one attempt, which fails while requests hold blocks."""
    timeout_s = request.timeout_s
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise WireError("timeout_s must be finite and non-negative", param="timeout_s")
    deadline_s = time.monotonic() + timeout_s
    while not server.engine.reset_prefix_cache(now_ns()):
        left_s = deadline_s - time.monotonic()
        if not timeout_s:
            return common.FlushCacheResponse(message="KV prefix cache reset refused; requests may be in flight")
        if left_s <= 0:
            raise WireError(f"The cache was in use for all of {timeout_s:g} s", 504)
        await asyncio.sleep(min(_FLUSH_RETRY_S, left_s))
    server.driver.wake()
    return common.FlushCacheResponse(success=True, message="Local KV prefix cache flushed successfully")


async def _start_profile(server: "Server", request: common.StartProfileRequest, _call: Any) -> common.ProfileResponse:
    given = [field.name for field, _ in request.ListFields()]
    if given:
        raise WireError(f"StartProfile options {', '.join(given)} are fixed at the server's start: send none", param=given[0])
    _set_profiling(server, True)
    return common.ProfileResponse(success=True, message="Start profiling succeeded")


async def _stop_profile(server: "Server", _request: Any, _call: Any) -> common.ProfileResponse:
    _set_profiling(server, False)
    return common.ProfileResponse(success=True, message="Stop profiling succeeded")


def _set_profiling(server: "Server", on: bool) -> None:
    if server.config.profiler_config is None:
        raise WireError("Profiling is not enabled: start the server with --profiler-config", 500)
    if server.operator.profiling is on:
        raise WireError(f"The profiler is {'already' if on else 'not'} running.", 409, "Conflict")
    server.operator.profiling = on


async def _tokenizer(server: "Server", _request: Any, call: Any) -> None:
    """The tokenizer's files as a zip, in pieces; the digest of all of it comes with the last one."""
    from windtunnel.serve.tokenizer_bundle import bundle, pieces

    for message in pieces(await asyncio.to_thread(bundle, server.config.tokenizer)):
        await call.write(message)


async def _subscribe_kv_events(_server: "Server", _request: Any, _call: Any) -> None:
    raise WireError("KV cache events are not served over gRPC", 501, "NotImplementedError")
