"""`/v1/loads` and its older form `/get_load`: live numbers, even while the gauges stand still (SGLang reference §7.5)."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_CORE = (
    ("num_running_reqs", "Requests that run"),
    ("num_waiting_reqs", "Requests that wait"),
    ("num_used_tokens", "Tokens in use"),
    ("max_total_num_tokens", "Size of the KV pool in tokens"),
    ("token_usage", "Share of the KV pool in use"),
    ("gen_throughput", "Generated tokens per second"),
    ("cache_hit_rate", "Cached share of the last prefill"),
)


def live(server: Server, rank: int) -> Mapping[str, float]:
    told: Mapping[str, float] = server.engines[rank].loads()
    return told


def gauges(server: Server, rank: int) -> Mapping[str, float]:
    """What the last report said: throughput and hit rate are measured by reports only."""
    told: Mapping[str, float] = server.metrics.reported(rank)
    return told


def rank_load(server: Server, rank: int, sections: frozenset[str]) -> dict[str, Any]:
    now, said = live(server, rank), gauges(server, rank)
    used, waiting = int(now["num_used_tokens"]), int(now["num_waiting_reqs"])
    told: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": int(now["num_running_reqs"]),
        "num_waiting_reqs": waiting,
        "num_total_reqs": int(now["num_running_reqs"]) + waiting,
        "num_waiting_uncached_tokens": int(now["num_waiting_uncached_tokens"]),
        "num_used_tokens": used,
        "num_total_tokens": used + int(now["num_waiting_uncached_tokens"]),
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": int(now["max_total_num_tokens"]),
        "max_running_requests": int(now["max_running_requests"]),
        "token_usage": round(now["token_usage"], 4),
        "gen_throughput": said.get("gen_throughput", 0.0),
        "cache_hit_rate": said.get("cache_hit_rate", 0.0),
        "utilization": said.get("utilization", 0.0),
    }
    return told | {
        name: make(server, {**said, **now}) for name, make in _SECTION_BODIES.items() if _SECTION_OF[name] in sections
    }


def _memory(server: Server, now: Mapping[str, float]) -> dict[str, Any]:
    return {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": int(now["max_total_num_tokens"])}


def _speculative(_server: Server, _now: Mapping[str, float]) -> None:
    """Not simulated."""


def _lora(server: Server, _now: Mapping[str, float]) -> dict[str, Any]:
    count = len(server.env.loras)
    return {"slots_used": count, "slots_total": server.config.limits.adapters, "utilization": 0.0}


def _disaggregation(server: Server, now: Mapping[str, float]) -> dict[str, Any]:
    def queue(name: str) -> int:
        return int(now.get(f"num_{name}", 0))

    return {
        "mode": server.config.disagg.mode,
        "prefill_bootstrap_queue_reqs": queue("prefill_bootstrap_queue_reqs"),
        "prefill_inflight_queue_reqs": queue("prefill_inflight_queue_reqs"),
        "decode_prealloc_queue_reqs": queue("decode_prealloc_queue_reqs"),
        "decode_transfer_queue_reqs": queue("decode_transfer_queue_reqs"),
        "decode_retracted_queue_reqs": int(now.get("decode_retracted_queue_reqs", 0)),
        "kv_transfer_speed_gb_s": 0.0,
        "kv_transfer_latency_ms": 0.0,
    }


def _queues(_server: Server, now: Mapping[str, float]) -> dict[str, Any]:
    told = {"waiting": now["num_waiting_reqs"], "grammar": 0, "paused": now.get("num_paused_reqs", 0)}
    told |= {"retracted": now.get("num_retracted_reqs", 0), "prealloc_ready": 0}
    return {name: int(value) for name, value in told.items()}


_SECTION_BODIES: Mapping[str, Any] = {
    "memory": _memory,
    "speculative": _speculative,
    "lora": _lora,
    "disaggregation": _disaggregation,
    "queues": _queues,
}
_SECTION_OF = {
    "memory": "memory",
    "speculative": "spec",
    "lora": "lora",
    "disaggregation": "disagg",
    "queues": "queues",
}


def sections(asked: Iterable[str]) -> frozenset[str]:
    """Raises WireError for one that is not known."""
    names = tuple(asked)
    for name in names:
        if name not in SECTIONS:
            raise WireError(f"include has {name!r}: must be a list of {', '.join(SECTIONS)}")
    return frozenset(SECTIONS if "all" in names else names)


def _ranks(server: Server, call: Call) -> list[int]:
    asked = call.query.get("dp_rank")
    if asked is None:
        return list(range(len(server.engines)))
    if not (asked.isascii() and asked.isdigit()) or int(asked) >= len(server.engines):
        raise WireError(f"dp_rank is {asked!r}: must be below {len(server.engines)}")
    return [int(asked)]


def v1_loads(server: Server, call: Call) -> Reply:
    started_s = time.perf_counter()
    wanted, ranks = sections(call.query.get("include", "all").split(",")), _ranks(server, call)
    told = [rank_load(server, rank, wanted) for rank in ranks]
    server.metrics.on_loads(time.perf_counter() - started_s)
    if call.query.get("format") == "prometheus":
        return Reply(_prometheus(told), 200, b"text/plain; version=0.0.4; charset=utf-8")
    return json_reply(
        {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "version": server.config.sglang.profile,
            "accelerator": "none",
            "num_accelerators": server.config.sglang.tp_size * len(server.engines),
            "loads": told,
        }
    )


def _prometheus(told: list[dict[str, Any]]) -> bytes:
    lines: list[str] = []
    for name, text in _CORE:
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} gauge"]
        lines += [f'sglang:{name}{{dp_rank="{load["dp_rank"]}"}} {float(load[name])}' for load in told]
    return "\n".join([*lines, ""]).encode()


def get_load(server: Server, _call: Call) -> Reply:
    """What sglang-router's `power_of_two` asks for once a second."""
    told = []
    for rank in range(len(server.engines)):
        now = live(server, rank)
        running, waiting = int(now["num_running_reqs"]), int(now["num_waiting_reqs"])
        tokens = int(now["num_used_tokens"] + now["num_waiting_uncached_tokens"])
        told.append({"dp_rank": rank, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens})
    return json_reply(told)
