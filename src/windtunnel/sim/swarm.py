"""The swarm: whole clusters under random faults, with every integrity check after every step.

    python -m windtunnel.sim.swarm --seconds 60          seeds from 0 on until the time is up
    python -m windtunnel.sim.swarm --seed 1234           that one seed again, step for step

A seed decides everything: sizes, pools, pacing, workload, clients and faults. First comes a phase with faults; then they
stop, and everything must make progress: no call may be left in flight, no engine may hold anything.
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
from windtunnel.sim.cluster import Cluster
from windtunnel.sim.policies import BUILT_IN
from windtunnel.sim.replica import Replica
from windtunnel.sim.scenario import FaultKind, Scenario, parse_scenario

LIMIT_SEEDS = 1_000_000
_FAULT_PHASE_S = 6.0


def random_scenario(seed: int) -> Scenario:
    """The scenario of this seed: small, crowded and unlucky."""
    draws = Random(f"swarm {seed}")
    engines = draws.randint(1, 4)
    faults = [_fault(draws, engines) for _ in range(draws.randint(0, 8))]
    return parse_scenario(
        {
            "seed": seed,
            "duration": "6s",
            "drain": "1h",
            "policy": draws.choice(list(BUILT_IN)),
            "engines": [{"count": engines, "config": _config(draws), "pacing": _pacing(draws)}],
            "network": {"jitter": draws.choice(["0", "100us", "5ms"]), "health_interval": draws.choice(["50ms", "1s"])},
            "workload": _workload(draws),
            "clients": _clients(draws),
            "faults": faults,
            "metrics": True,
            "timeline_requests": 0,
        }
    )


def _fault(draws: Random, engines: int) -> dict[str, Any]:
    return {
        "at": f"{draws.uniform(0, _FAULT_PHASE_S):.9f}s",
        "engine": draws.randrange(engines),
        "kind": draws.choice(get_args(FaultKind)),
        "duration": f"{draws.choice([0.001, 0.05, 1, 4]) * draws.random() + 1e-6:.9f}s",
    }


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

    def __init__(self, replica: Replica) -> None:
        self.checks = 0
        self._replica, self._generation = replica, replica.generation
        self._cache = CacheReplay()
        self._tell_router = replica.on_kv_events
        replica.after_step = self.after_step
        replica.on_kv_events = self.on_kv_events

    def on_kv_events(self, engine: int, events: Sequence[KvEvent]) -> None:
        self._notice_restart()
        self._cache.fold(events)
        if self._tell_router is not None:
            self._tell_router(engine, events)

    def _notice_restart(self) -> None:
        """A new process has an empty cache and does not say so."""
        if self._generation != self._replica.generation:
            self._generation, self._cache = self._replica.generation, CacheReplay()

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
    watches = [Watch(replica) for replica in cluster.replicas]
    result = cluster.run()
    stuck = [call.question.number for call in cluster.clients.live.values()]
    assert not stuck, f"after the faults these calls made no progress: {stuck[:10]}"
    for replica in cluster.replicas:
        left = replica.engine.live() if replica.up else ()
        assert not left, f"engine {replica.index} still holds {[view.request_id for view in left][:10]}"
    in_flight = [state.in_flight for state in cluster.router.states]
    assert not any(in_flight), f"the router still counts {in_flight} in flight"
    return {
        "seed": seed,
        "checks": sum(watch.checks for watch in watches),
        "requests": result.summary["requests"],
        "attempts": result.summary["attempts"],
    }


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
