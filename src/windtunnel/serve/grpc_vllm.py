"""`vllm.grpc.engine.VllmEngine` over the same jobs and the same engine as HTTP (vLLM reference §8).

`Abort` ends a stream from the server's side, with a `complete` that says `abort`.
"""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from windtunnel.serve import grpc_calls as calls
from windtunnel.serve.clock import now_ns
from windtunnel.serve.generate import planned
from windtunnel.serve.grpc_events import EventFeed
from windtunnel.serve.grpc_front import Method
from windtunnel.serve.loads import LoadObserver
from windtunnel.wire import grpc_vllm as wire
from windtunnel.wire.family import WireError

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]

_FLUSH_RETRY_S = 0.1


def methods(server: "Server") -> Mapping[str, Method]:
    """The table of methods. Load reports need to see the engine's steps from the start."""
    loads = LoadObserver()
    server.driver.observe(loads)
    feed = EventFeed(partial(_engine_load, loads, server))
    if server.config.kv_events.publishes:
        server.driver.observe(feed)
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
        "GetTokenizer": calls.send_tokenizer,
        "SubscribeKvEvents": feed.subscribe,
    }


async def _generate(server: "Server", request: pb.GenerateRequest, call: Any) -> None:
    if server.config.runner != "generate":
        raise WireError("This model makes vectors, not text: call Embed")
    plan, told = partial(wire.plan, request, server.env), partial(wire.readable_kv_transfer, request)
    await calls.generate(server, call, request, plan, wire.GenerateEncoder, told)


async def _embed(server: "Server", request: pb.EmbedRequest, call: Any) -> pb.EmbedResponse:
    if server.config.runner != "pooling" or server.env.pooling_task != "embed":
        raise WireError("This model makes no embeddings: start the server with --runner pooling --convert embed")
    arrival_ns = now_ns()
    calls.inject_failure(server, call)
    generation = await planned(server, request.ByteSize(), partial(wire.plan_embedding, request, server.env))
    await calls.collected(server, generation, arrival_ns)
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
    """No media. A router learns from it which P/D connector there is (clients §4.2)."""
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
        **_connector(server),
    )


def _connector(server: "Server") -> dict[str, str]:
    if not server.config.kv_transfer.on:
        return {}
    config = server.engine.connector.config
    return {"kv_connector": config.connector, "kv_role": config.role, "kv_engine_id": config.engine_id}


async def _loads(loads: LoadObserver, server: "Server", _request: Any, _call: Any) -> pb.GetLoadsResponse:
    """One entry for each rank, core numbers only, whatever `include` says (smg-grpc-servicer 0.14.1)."""
    scheduler = server.config.scheduler
    capacity = scheduler.num_gpu_blocks * scheduler.block_size
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
            num_waiting_uncached_tokens=round(_waiting_tokens(server.engines[rank]) * (1 - report.hit_rate)),
        )
        for rank, report in loads.reports(now_ns())
    ]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return pb.GetLoadsResponse(timestamp=stamp, version=server.config.vllm_version, dp_rank_count=len(entries), loads=entries)


def _engine_load(loads: LoadObserver, server: "Server", rank: int) -> common.EngineLoad:
    """The numbers of `GetLoads` as a record of the event stream."""
    report = loads.report(rank, now_ns())
    scheduler = server.config.scheduler
    capacity = scheduler.num_gpu_blocks * scheduler.block_size
    return common.EngineLoad(
        running_requests=report.running,
        waiting_requests=report.waiting,
        waiting_uncached_tokens=round(_waiting_tokens(server.engines[rank]) * (1 - report.hit_rate)),
        token_usage=report.kv_usage,
        gen_throughput=report.tokens_per_s,
        max_running_requests=scheduler.max_num_seqs,
        cache_hit_rate=report.hit_rate,
        num_used_tokens=round(report.kv_usage * capacity),
        max_total_num_tokens=capacity,
    )


def _waiting_tokens(engine: Any) -> int:
    """Prompt tokens of requests that the engine has not begun."""
    return sum(view.prompt_tokens for view in engine.live() if not view.computed_tokens and not view.output_tokens)


async def _flush_cache(server: "Server", request: common.FlushCacheRequest, _call: Any) -> common.FlushCacheResponse:
    """Without a time to wait one attempt, which fails while requests hold blocks."""
    timeout_s = request.timeout_s
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise WireError("timeout_s must be finite and non-negative", param="timeout_s")
    deadline_s = time.monotonic() + timeout_s
    while not _reset(server):
        left_s = deadline_s - time.monotonic()
        if not timeout_s:
            return common.FlushCacheResponse(message="KV prefix cache reset refused; requests may be in flight")
        if left_s <= 0:
            raise WireError(f"The cache was in use for all of {timeout_s:g} s", 504)
        await asyncio.sleep(min(_FLUSH_RETRY_S, left_s))
    server.driver.wake()
    return common.FlushCacheResponse(success=True, message="Local KV prefix cache flushed successfully")


def _reset(server: "Server") -> bool:
    """Of all ranks; each forgets what it can."""
    done = [engine.reset_prefix_cache(now_ns()) for engine in server.engines]
    return all(done)


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
