"""The swarm: whole clusters under random faults, with every integrity check after every step.

    python -m windtunnel.sim.swarm --seconds 60          seeds from 0 on until the time is up
    python -m windtunnel.sim.swarm --seed 1234           that one seed again, step for step

A seed decides everything: the kind of cluster (vLLM or SGLang, whole or as prefill and decode workers), sizes, pools, pacing,
workload, clients and faults. First comes a phase with faults; then they stop, and everything must make progress: no call may
be left in flight, no engine may hold anything. What a client no longer wants may not enter an engine once its router knows.

SGLang's prefill and decode workers run releases whose leaks are known (`LEAKY`) and the newest one with the two switches that
no release has (a limit for Transferring, tombstones). Only of the latter is it demanded that nothing is left. Of vLLM's it is
demanded where no transfer stalls, for nothing limits one there; not of NIXL's push, whose failure leaves a decode waiting.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from random import Random
from typing import Any, get_args

from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, StepOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.disagg.worker import DisaggWorker
from windtunnel.core.vllm.connector.config import MOONCAKE, PULL, PUSH
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.sim.calls import NEVER, Attempt
from windtunnel.sim.cluster import Cluster
from windtunnel.sim.pairs import TOLD, PairRouter
from windtunnel.sim.policies import BUILT_IN, PAIRS
from windtunnel.sim.replica import Replica
from windtunnel.sim.scenario import WIRE_FAULTS, FaultKind, Scenario, parse_scenario

LIMIT_SEEDS = 1_000_000
SHAPES = ("vllm", "vllm", "sglang", "pd", "pd", "vllm-pd")
IN_PAIRS = ("pd", "vllm-pd")
LEAKY = ("0.5.9", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.23")
SOUND = "0.5.23"
_FAULT_PHASE_S = 6.0


def random_scenario(seed: int) -> Scenario:
    """The scenario of this seed: small, crowded and unlucky."""
    shape = Random(f"swarm shape {seed}").choice(SHAPES)
    draws = Random(f"swarm {seed}")
    engines = _ENGINES[shape](draws)
    roles = [spec.get("role", "unified") for spec in engines for _ in range(spec["count"])]
    faults = [_fault(draws, roles, shape) for _ in range(draws.randint(0, 8))]
    return parse_scenario(
        {
            "seed": seed,
            "duration": "6s",
            "drain": "1h",
            "policy": draws.choice([*BUILT_IN, *([PAIRS] * 4 if shape in IN_PAIRS else [])]),
            "engines": engines,
            "pd": {
                "aborts": draws.choice(["both", "both", "prefill", "decode", "none"]),
                "lag": draws.choice(["0", "20ms"]),
                "cancel_peer": draws.random() < 0.7,
            }
            if shape in IN_PAIRS
            else {},
            "network": {"jitter": draws.choice(["0", "100us", "5ms"]), "health_interval": draws.choice(["50ms", "1s"])},
            "workload": _workload(draws),
            "clients": _clients(draws),
            "faults": faults,
            "metrics": True,
            "timeline_requests": 0,
        }
    )


def _fault(draws: Random, roles: Sequence[str], shape: str) -> dict[str, Any]:
    engine = draws.randrange(len(roles))
    missing = WIRE_FAULTS if roles[engine] == "unified" else ()
    no_writes = ("stall_writes", "fail_writes") if roles[engine] == "decode" else ()
    no_sleep = () if shape.startswith("vllm") else ("sleep",)
    kinds = [kind for kind in get_args(FaultKind) if kind not in (*missing, *no_writes, *no_sleep)]
    return {
        "at": f"{draws.uniform(0, _FAULT_PHASE_S):.9f}s",
        "engine": engine,
        "kind": draws.choice(kinds),
        "duration": f"{draws.choice([0.001, 0.05, 1, 4]) * draws.random() + 1e-6:.9f}s",
        "share": draws.choice([0.1, 0.5, 1.0]),
        "late": draws.choice(["1ms", "100ms", "3s"]),
    }


def _vllm(draws: Random) -> list[dict[str, Any]]:
    return [{"count": draws.randint(1, 4), "config": _config(draws), "pacing": _pacing(draws)}]


def _sglang(draws: Random) -> list[dict[str, Any]]:
    timeouts = {
        "max_queued_requests": draws.choice([None, 4]),
        "req_waiting_timeout_ns": draws.choice([None, "300ms"]),
        "req_running_timeout_ns": draws.choice([None, "1s"]),
    }
    config = {key: value for key, value in {**_sglang_config(draws), **timeouts}.items() if value is not None}
    return [{"kind": "sglang", "count": draws.randint(1, 4), "config": config, "pacing": _pacing(draws)}]


def _pd(draws: Random) -> list[dict[str, Any]]:
    """Prefill and decode workers whose memory, slots and timeouts are small."""
    sound = draws.random() < 0.6
    pacing, config = _pacing(draws), _sglang_config(draws)
    disagg = {
        "profile": SOUND if sound else draws.choice(LEAKY),
        "waiting_timeout_ns": "2s",
        "bootstrap_timeout_ns": "2s",
        "settle_timeout_ns": "500ms",
        "deferred_release_timeout_ns": draws.choice(["50ms", "1s"]),
        "heartbeat_interval_ns": "2s",
        "metadata_slots": draws.choice([1, 4, 64]),
        "num_reserved_decode_tokens": draws.choice([0, 16]),
        "transfer_queues": draws.choice([1, 4]),
        "promote_gap_ns": draws.choice([0, 0, "3ms"]),
        "kv_bytes_per_token": draws.choice([1000, 100_000]),
        "follow_bootstrap_room": draws.random() < 0.7,
        **({"transferring_timeout_ns": "3s", "tombstones": True} if sound else {}),
    }
    ranks = draws.choice([(1, 1), (1, 1), (2, 1), (2, 2), (1, 2)])
    transfer = {"bandwidth_gb_s": draws.choice([10.0, 0.1, 0.01]), "dead_peer": draws.choice(["50ms", "1s"])}
    common = {"kind": "sglang", "config": config, "pacing": pacing, "transfer": transfer}
    decode = {"decode_radix_cache": draws.random() < 0.3, "retraction": draws.choice(["cpu_tensor", "host_pool", "none"])}
    return [
        {**common, "role": "prefill", "count": draws.randint(1, 3), "tp": ranks[0], "disagg": disagg},
        {**common, "role": "decode", "count": draws.randint(1, 3), "tp": ranks[1], "disagg": {**disagg, **decode}},
    ]


def _vllm_pd(draws: Random) -> list[dict[str, Any]]:
    """Prefill and decode engines with short leases."""
    connector = draws.choice([PULL, PULL, PUSH, MOONCAKE, MOONCAKE])
    disagg = {
        "connector": connector,
        "load_failure_policy": draws.choice(["fail", "recompute"]),
        "kv_bytes_per_token": draws.choice([1000, 100_000]),
        **(_mooncake if connector == MOONCAKE else _nixl)(draws),
    }
    transfer = {"bandwidth_gb_s": draws.choice([10.0, 0.1, 0.01]), "dead_peer": draws.choice(["50ms", "1s"])}
    common = {"config": _config(draws), "pacing": _pacing(draws), "transfer": transfer, "disagg": disagg}
    tp = draws.choice([1, 1, 2])
    return [
        {**common, "role": "prefill", "count": draws.randint(1, 3)},
        {**common, "role": "decode", "count": draws.randint(1, 3), "tp": tp},
    ]


def _nixl(draws: Random) -> dict[str, Any]:
    return {"lease_ns": draws.choice(["60ms", "1s"]), "abort_timeout_ns": draws.choice([None, None, "3s"])}


def _mooncake(draws: Random) -> dict[str, Any]:
    """Short patience, and few places for pulls."""
    return {
        "abort_timeout_ns": draws.choice(["60ms", "1s", "3s"]),
        "pull_margin_ns": draws.choice([0, "20ms", "1s"]),
        "num_workers": draws.choice([1, 2, 10]),
    }


def _sglang_config(draws: Random) -> dict[str, Any]:
    page = draws.choice([1, 4, 16])
    return {
        "page_size": page,
        "max_total_num_tokens": draws.choice([256, 512, 4096]),
        "context_length": draws.choice([200, 512]),
        "max_running_requests": draws.choice([1, 3, 16]),
        "chunked_prefill_size": draws.choice([-1, 16, 64, 512]),
        "max_prefill_tokens": draws.choice([16, 512]),
        "schedule_policy": draws.choice(["fcfs", "lpm", "random", "lof", "priority"]),
        "disable_radix_cache": draws.random() < 0.2,
        "overlap": draws.random() < 0.5,
        "decode_log_interval": draws.choice([1, 40]),
    }


_ENGINES = {"vllm": _vllm, "sglang": _sglang, "pd": _pd, "vllm-pd": _vllm_pd}


def _config(draws: Random) -> dict[str, Any]:
    block_size = draws.choice([1, 4, 16])
    model_len = draws.choice([64, 200, 512])
    blocks = -(-model_len // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": model_len,
        "num_blocks": blocks + draws.choice([0, 3, blocks, 8 * blocks]),
        "max_num_seqs": draws.choice([1, 2, 8, 64]),
        "max_num_batched_tokens": draws.choice([1, 7, 64, 512]),
        "policy": draws.choice(["fcfs", "priority"]),
        "watermark": draws.choice([0.0, 0.1]),
        "reserve_full_isl": draws.random() < 0.7,
        "long_prefill_token_threshold": draws.choice([0, 0, 5]),
        "enable_prefix_caching": draws.random() < 0.8,
        "max_num_queued_reqs": draws.choice([None, 4, 32]),
        "max_num_queued_tokens": draws.choice([None, 300]),
        "async_scheduling": draws.random() < 0.3,
    }


def _pacing(draws: Random) -> dict[str, Any]:
    if draws.random() < 0.6:
        return {"model": "step", "base": draws.choice(["1ms", "10ms"]), "prefill_token": "20us", "decode_seq": "100us"}
    return {
        "model": "request",
        "ttft": draws.choice(["0", "30ms"]),
        "ttft_std": "10ms",
        "itl": draws.choice(["0", "5ms"]),
        "itl_std": "2ms",
        "prefill_token": "10us",
        "load_factor": draws.choice([1.0, 3.0]),
        "distribution": draws.choice(["normal", "lognormal", "uniform", "constant"]),
    }


def _workload(draws: Random) -> dict[str, Any]:
    return {
        "kind": draws.choice(["poisson", "constant", "gamma", "onoff", "closed", "multiturn"]),
        "rate": draws.choice([2, 10, 40]),
        "on": "500ms",
        "off": "1s",
        "users": draws.choice([1, 10, 40]),
        "think": draws.choice(["0", "50ms"]),
        "requests": draws.choice([20, 60, 120]),
        "prompt_tokens": draws.choice(["uniform:1:60", "uniform:1:300", "choice:1,15,16,17,64"]),
        "output_tokens": draws.choice(["uniform:1:20", "uniform:1:120", "1"]),
        "shared_prefix_tokens": draws.choice([0, 32]),
        "prefix_groups": draws.choice([1, 4]),
    }


def _clients(draws: Random) -> dict[str, Any]:
    return {
        "timeout": draws.choice(["500ms", "5s"]),
        "ttft_timeout": draws.choice(["0", "200ms"]),
        "retries": draws.choice([0, 3]),
        "retry_budget": 0.5,
        "retry_on": ["refused", "failed", "timed_out"],
        "hedge_after": draws.choice(["0", "0", "50ms"]),
        "abort": {
            "share": draws.choice([0, 0.3, 1.0]),
            "when": draws.choice(["tokens", "time", "queued"]),
            "tokens": draws.choice([1, 2, 5, 17]),
            "after": draws.choice(["1ms", "40ms", "300ms"]),
        },
    }


class CacheReplay:
    """What the KV events of one engine say is cached. Must equal what is cached, whenever the engine is idle."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def fold(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self._fold_one(event)

    def _fold_one(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self.hashes.update(event.block_hashes)
            case BlockRemoved():
                self.hashes.difference_update(event.block_hashes)
            case AllBlocksCleared():
                self.hashes.clear()


class Watch:
    """Checks one engine after each of its steps. Owned by one run."""

    def __init__(self, replica: Replica, told: bool) -> None:
        """`told`: this engine's leg hears of clients that have gone."""
        self.checks = 0
        self.rooms: set[int] = set()
        """That this process was given."""
        self._told = told
        self._replica, self._generation = replica, replica.generation
        self._cache = CacheReplay()
        self._tell_router = replica.on_kv_events
        replica.after_step = self.after_step
        replica.on_submit = self.on_submit
        replica.on_kv_events = self.on_kv_events

    def on_submit(self, replica: Replica, attempt: Attempt, request: EngineRequest) -> None:
        """Nothing enters an engine for a client that has gone, once the router knows."""
        self._notice_restart()
        if request.bootstrap is not None:
            self.rooms.add(request.bootstrap[2])
        owner = attempt.owner or attempt
        assert not self._told or owner.left_ns == NEVER, f"{attempt.request_id} enters engine {replica.index} for nobody"

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        self._notice_restart()
        self._cache.fold(events)
        if self._tell_router is not None:
            self._tell_router(engine, events)

    def _notice_restart(self) -> None:
        """A new process has an empty cache and does not say so."""
        if self._generation != self._replica.generation:
            self._generation, self._cache = self._replica.generation, CacheReplay()
            self.rooms.clear()

    def after_step(self, replica: Replica, step: StepOutput) -> None:
        """What a step changes in the cache is told at its end; so only an idle engine's cache can be compared."""
        self.checks += 1
        replica.check()
        self._notice_restart()
        idle = step.stats is not None and replica.engine.next_event_at() is None
        cached = getattr(replica.engine, "cached_hashes", None) if idle else None
        assert cached is None or cached == self._cache.hashes, f"engine {replica.index}: the KV events tell of another cache"


def run_seed(seed: int) -> dict[str, Any]:
    """Raises AssertionError (or whatever broke) if anything was lost, doubled or stuck."""
    cluster = Cluster(random_scenario(seed), keep_rows=False, kv_events=True)
    told = TOLD[cluster.scenario.pd.aborts]
    watches = [
        Watch(replica, spec.role in (*told, "unified")) for replica, spec in zip(cluster.replicas, cluster.specs, strict=True)
    ]
    result = cluster.run()
    stuck = [call.question.number for call in cluster.clients.live.values()]
    assert not stuck, f"after the faults these calls made no progress: {stuck[:10]}"
    if _sound(cluster.scenario):
        _check_empty(cluster, watches)
    return {
        "seed": seed,
        "checks": sum(watch.checks for watch in watches),
        "requests": result.summary["requests"],
        "attempts": result.summary["attempts"],
        "pd": result.summary.get("pd"),
    }


def _sound(scenario: Scenario) -> bool:
    """No leak that a release is known for can happen."""
    if any(spec.role != "unified" and spec.kind == "vllm" for spec in scenario.engines):
        stalls = any(fault.kind == "stall_writes" for fault in scenario.faults)
        return not stalls and scenario.engines[0].disagg["connector"] != PUSH
    return all(spec.role == "unified" or "tombstones" in spec.disagg for spec in scenario.engines)


def _check_empty(cluster: Cluster, watches: Sequence[Watch]) -> None:
    """After the faults everything has ended: engines, router, both legs."""
    for replica, watch in zip(cluster.replicas, watches, strict=True):
        left = replica.engine.live() if replica.up else ()
        assert not left, f"engine {replica.index} still holds {[view.request_id for view in left][:10]}"
        if replica.up and isinstance(replica.engine, DisaggWorker):
            _check_resources(replica.index, replica.engine, watch)
        if replica.up and isinstance(replica.engine, ConnectorEngine):
            held = replica.engine.outstanding()
            assert not any(held.values()), f"engine {replica.index} is idle and holds {held}"
    in_flight = [state.in_flight for state in cluster.router.states]
    assert not any(in_flight), f"the router still counts {in_flight} in flight"
    if isinstance(cluster.router, PairRouter):
        for role, counts in cluster.router.leg_counts().items():
            assert not counts["on_the_way"] and not counts["in_flight"], f"{role} legs are left: {counts}"


def _check_resources(index: int, worker: DisaggWorker, watch: Watch) -> None:
    """Nothing is held. Only a room whose prefill leg never came to this process may stay: its decode made it (P54)."""
    rooms = [room for rank in worker.managers for room in rank.table]
    held = {name: count for name, count in worker.outstanding().items() if count and "rooms" not in name}
    assert not held, f"engine {index} is idle and holds {held}"
    left = sorted(watch.rooms.intersection(rooms))
    assert not left, f"engine {index} keeps rooms of requests that have ended: {left[:10]}"


def swarm(seconds: float, first_seed: int) -> tuple[int, int, int | None]:
    """Seeds run, steps checked, and the seed that failed if one did."""
    until_s, checks = time.monotonic() + seconds, 0
    for seed in range(first_seed, first_seed + LIMIT_SEEDS):
        if time.monotonic() >= until_s:
            return seed - first_seed, checks, None
        try:
            checks += run_seed(seed)["checks"]
        except Exception:  # noqa: BLE001 (whatever breaks is the finding; the traceback is printed)
            traceback.print_exc()
            return seed - first_seed, checks, seed
    return LIMIT_SEEDS, checks, None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m windtunnel.sim.swarm", description="Clusters under random faults.")
    parser.add_argument("--seconds", type=float, help="run seeds for so long")
    parser.add_argument("--seed", type=int, help="the first seed; alone: run just this one")
    chosen = parser.parse_args(arguments)
    if chosen.seconds is None:
        print(json.dumps(run_seed(chosen.seed or 0)))
        return 0
    first = chosen.seed if chosen.seed is not None else 0
    print(f"swarm: seeds from {first}, {chosen.seconds:g} s", flush=True)
    started_s = time.monotonic()
    seeds, checks, failed = swarm(chosen.seconds, first)
    elapsed_s = time.monotonic() - started_s
    print(f"swarm: {seeds} seeds, {checks} steps checked, {seeds / elapsed_s:.2f} seeds/s")
    if failed is None:
        return 0
    print(f"swarm: seed {failed} failed; replay: python -m windtunnel.sim.swarm --seed {failed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
