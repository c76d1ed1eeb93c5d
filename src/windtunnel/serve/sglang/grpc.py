"""`sglang.grpc.scheduler.SglangScheduler` over the same jobs and the same engine as HTTP (SGLang reference §8.1)."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from windtunnel.core.request import Lora
from windtunnel.serve import grpc_calls as calls
from windtunnel.serve.clock import now_ns
from windtunnel.serve.grpc_front import Method
from windtunnel.serve.sglang import health, loads
from windtunnel.serve.sglang.info import model_info, server_arguments
from windtunnel.wire import grpc_sglang as wire
from windtunnel.wire.family import WireError

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"]

_LOOK_NS = 20_000_000
_FLUSH_WAIT_S_MAX = 600.0
_SECTIONS: Mapping[str, Any] = {
    "memory": pb.MemoryMetrics,
    "lora": pb.LoRAMetrics,
    "disaggregation": pb.DisaggregationMetrics,
    "queues": pb.QueueMetrics,
}


def methods(server: "Server") -> Mapping[str, Method]:
    """The table of methods."""
    beats, adapters, started_s = health.Heartbeat(), Adapters(server), time.time()
    server.driver.observe(beats)
    return {
        "Generate": partial(_generate, adapters),
        "Embed": _embed,
        "HealthCheck": partial(_health_check, beats),
        "Abort": _abort,
        "GetModelInfo": _model_info,
        "GetServerInfo": partial(_server_info, started_s),
        "GetLoads": _loads,
        "FlushCache": _flush_cache,
        "StartProfile": partial(_profile, "Start profiling succeeded"),
        "StopProfile": partial(_profile, "Stop profiling succeeded"),
        "GetTokenizer": calls.send_tokenizer,
        "SubscribeKvEvents": calls.no_kv_events,
        "LoadLoRAAdapter": adapters.load,
        "UnloadLoRAAdapter": adapters.unload,
        "ListLoadedLoRAAdapters": adapters.listed,
    }


async def _generate(adapters: "Adapters", server: "Server", request: pb.GenerateRequest, call: Any) -> None:
    env: Any = server.env
    plan = partial(wire.plan, request, adapters.find(request.lora_id), env)
    await calls.generate(server, call, request, plan, wire.SchedulerEncoder)


async def _embed(_server: "Server", _request: Any, _call: Any) -> None:
    raise WireError("This model makes no embeddings")


async def _health_check(beats: health.Heartbeat, server: "Server", _request: Any, _call: Any) -> pb.HealthCheckResponse:
    """A one-token probe, as `/health_generate`, that answers as soon as anything comes back from the scheduler."""
    if not server.ready or server.dead or server.jobs.draining:
        return pb.HealthCheckResponse(message="Server is shutting down or not ready")
    if await health.probe(server, beats, look_ns=_LOOK_NS):
        return pb.HealthCheckResponse(healthy=True, message="Health check passed")
    return pb.HealthCheckResponse(message="Health check timeout")


async def _abort(server: "Server", request: pb.AbortRequest, _call: Any) -> pb.AbortResponse:
    """Hands the id to the scheduler, which aborts all ids that begin with it (§5); success says that it was handed on."""
    if request.request_id.startswith(health.PREFIX):
        return pb.AbortResponse(message=f"Request {request.request_id} not found")
    found = sum(engine.abort_matching(request.request_id, now_ns(), notify=True) for engine in server.engines)
    server.metrics.on_aborts(found)
    server.driver.wake()
    return pb.AbortResponse(success=True, message=f"Request {request.request_id} aborted")


async def _model_info(server: "Server", _request: Any, _call: Any) -> pb.GetModelInfoResponse:
    env, told = server.env, model_info(server)
    same = (
        "model_path",
        "tokenizer_path",
        "is_generation",
        "weight_version",
        "served_model_name",
        "model_type",
        "architectures",
    )
    defaults = {name: value for name, value in env.default_sampling.items() if name != "max_tokens"}
    return pb.GetModelInfoResponse(
        **{name: told[name] for name in same},
        max_context_length=env.max_model_len,
        vocab_size=env.vocabulary,
        eos_token_ids=[env.tokenizer.eos_token_id, *env.extra_eos_token_ids],
        max_req_input_len=server.engine.config.input_bound,
        default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "",
    )


async def _server_info(started_s: float, server: "Server", _request: Any, _call: Any) -> pb.GetServerInfoResponse:
    """`max_running_requests` among the arguments is the bound that the scheduler keeps, whether or not a flag set it."""
    engine = server.engine.config
    shown = {**server_arguments(server), "max_running_requests": engine.max_running_requests}
    arguments, scheduler = Struct(), Struct()
    arguments.update(json.loads(json.dumps(shown)))
    scheduler.update({"max_total_num_tokens": engine.capacity, "max_req_input_len": engine.input_bound})
    return pb.GetServerInfoResponse(
        server_args=arguments,
        scheduler_info=scheduler,
        active_requests=len(server.jobs),
        is_paused=server.engine.paused is not None,
        uptime_seconds=time.time() - started_s,
        sglang_version=server.config.sglang.profile,
        server_type="grpc",
        start_time=Timestamp(seconds=int(started_s)),
        max_total_num_tokens=engine.capacity,
    )


async def _loads(server: "Server", request: pb.GetLoadsRequest, _call: Any) -> pb.GetLoadsResponse:
    """`/v1/loads` in messages."""
    sections = loads.sections(request.include or ["all"])
    if request.HasField("dp_rank") and not 0 <= request.dp_rank < len(server.engines):
        raise WireError(f"dp_rank is {request.dp_rank}: must be below {len(server.engines)}", param="dp_rank")
    ranks = [request.dp_rank] if request.HasField("dp_rank") else range(len(server.engines))
    told = [_scheduler_load(loads.rank_load(server, rank, sections)) for rank in ranks]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return pb.GetLoadsResponse(
        timestamp=stamp,
        version=server.config.sglang.profile,
        dp_rank_count=len(told),
        loads=told,
        aggregate=_aggregate(told),
    )


def _scheduler_load(values: Mapping[str, Any]) -> pb.SchedulerLoad:
    sections = {name: make(**_known(make, values[name])) for name, make in _SECTIONS.items() if values.get(name)}
    flat = {name: value for name, value in values.items() if not isinstance(value, dict) and name != "speculative"}
    return pb.SchedulerLoad(**_known(pb.SchedulerLoad, flat), **sections)


def _known(message: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = message.DESCRIPTOR.fields_by_name
    return {name: value for name, value in values.items() if name in names}


def _aggregate(ranks: list[pb.SchedulerLoad]) -> pb.AggregateMetrics:
    return pb.AggregateMetrics(
        total_running_reqs=sum(rank.num_running_reqs for rank in ranks),
        total_waiting_reqs=sum(rank.num_waiting_reqs for rank in ranks),
        total_reqs=sum(rank.num_total_reqs for rank in ranks),
        avg_token_usage=sum(rank.token_usage for rank in ranks) / len(ranks),
        avg_throughput=sum(rank.gen_throughput for rank in ranks) / len(ranks),
        avg_utilization=sum(rank.utilization for rank in ranks) / len(ranks),
    )


async def _flush_cache(server: "Server", request: common.FlushCacheRequest, _call: Any) -> common.FlushCacheResponse:
    if not 0 <= request.timeout_s <= _FLUSH_WAIT_S_MAX or math.isnan(request.timeout_s):
        raise WireError(f"timeout_s must be from 0 to {_FLUSH_WAIT_S_MAX:g}, got {request.timeout_s}", param="timeout_s")
    if request.timeout_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.jobs.idle(), request.timeout_s)
    done = [engine.flush_cache(now_ns()) for engine in server.engines]
    server.driver.wake()
    if all(done):
        return common.FlushCacheResponse(success=True, message="Cache flushed successfully")
    return common.FlushCacheResponse(message="Failed to flush cache: requests are running or waiting")


async def _profile(message: str, _server: "Server", _request: Any, _call: Any) -> common.ProfileResponse:
    """Nothing is profiled, as over HTTP."""
    return common.ProfileResponse(success=True, message=message)


class Adapters:
    """LoRA adapters by the ids that callers gave them. Adapters loaded otherwise have their name as id."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._names: dict[str, str] = {}
        self._pinned: set[str] = set()

    def find(self, lora_id: str) -> Lora | None:
        """The adapter with this id; None for none asked for. Raises WireError."""
        if not lora_id:
            return None
        lora: Lora | None = self._server.env.loras.get(self._names.get(lora_id, lora_id))
        if lora is None:
            raise WireError(f"LoRA adapter {lora_id!r} is not loaded.", param="lora_id")
        return lora

    async def load(self, server: "Server", request: pb.LoadLoRAAdapterRequest, _call: Any) -> pb.LoadLoRAAdapterResponse:
        problem = self._load(request)
        if problem is None:
            lora = Lora(request.lora_name, request.lora_path, server.operator.next_lora_id())
            server.env = replace(server.env, loras={**server.env.loras, lora.name: lora})
            self._names[request.lora_id] = lora.name
            self._pinned |= {request.lora_id} if request.pinned else set()
        return pb.LoadLoRAAdapterResponse(success=problem is None, message=problem or "", loaded_lora_ids=self._ids())

    def _load(self, request: pb.LoadLoRAAdapterRequest) -> str | None:
        loras, limit = self._server.env.loras, self._server.config.limits.adapters
        for name in ("lora_name", "lora_path", "lora_id"):
            if not getattr(request, name):
                return f"{name} is missing"
        if request.lora_name in loras or request.lora_id in self._names:
            return f"LoRA adapter {request.lora_name!r} with id {request.lora_id!r} is already loaded."
        return f"The server already holds {limit} adapters: unload one first." if len(loras) >= limit else None

    async def unload(self, server: "Server", request: pb.UnloadLoRAAdapterRequest, _call: Any) -> pb.UnloadLoRAAdapterResponse:
        name = request.lora_name
        known = name in server.env.loras and request.lora_id in ("", self._id_of(name))
        if known:
            self._pinned.discard(self._id_of(name))
            self._names.pop(self._id_of(name), None)
            rest = {other: lora for other, lora in server.env.loras.items() if other != name}
            server.env = replace(server.env, loras=rest)
        problem = "" if known else f"LoRA adapter {name!r} with id {request.lora_id!r} is not loaded."
        return pb.UnloadLoRAAdapterResponse(success=known, message=problem, loaded_lora_ids=self._ids())

    async def listed(self, server: "Server", _request: Any, _call: Any) -> pb.ListLoadedLoRAAdaptersResponse:
        loras = ((self._id_of(lora.name), lora) for lora in server.env.loras.values())
        return pb.ListLoadedLoRAAdaptersResponse(
            loaded_adapters=[
                pb.LoadedLoRAAdapter(lora_id=at, lora_name=lora.name, lora_path=lora.path, pinned=at in self._pinned)
                for at, lora in loras
            ]
        )

    def _id_of(self, name: str) -> str:
        return next((lora_id for lora_id, known in self._names.items() if known == name), name)

    def _ids(self) -> list[str]:
        return [self._id_of(name) for name in self._server.env.loras]
