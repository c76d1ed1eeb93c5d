"""A whole cluster: conservation, determinism, closed forms, faults."""

import json

import pytest

from windtunnel.sim.cluster import Cluster, run
from windtunnel.sim.scenario import Scenario, parse_scenario

SMALL = {"engines": [{"count": 4}], "workload": {"rate": 40, "output_tokens": "uniform:5:60"}, "duration": "10s"}
TINY_POOL = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 8}


def scenario(**changes: object) -> Scenario:
    return parse_scenario({**SMALL, **changes})


def test_same_seed_same_bytes() -> None:
    first, second = run(scenario(seed=7)), run(scenario(seed=7))
    assert first.rows == second.rows
    assert first.metrics == second.metrics
    assert first.timeline.text() == second.timeline.text()
    assert json.dumps(first.summary) == json.dumps(second.summary)


def test_another_seed_another_run() -> None:
    assert run(scenario(seed=7)).rows != run(scenario(seed=8)).rows


def test_lone_request_takes_what_the_step_model_says() -> None:
    """One prefill step, then a decode step a token, and the network around them."""
    result = run(
        parse_scenario(
            {
                "network": {"client_router": "1ms", "router_engine": "2ms", "bandwidth_mbit": 1e12},
                "engines": [{"pacing": {"base": "10ms", "prefill_token": "20us", "decode_seq": "100us"}}],
                "workload": {"kind": "closed", "users": 1, "requests": 1, "prompt_tokens": 100, "output_tokens": 50},
            }
        )
    )
    row = json.loads(result.rows[0])
    assert row["ttft_ns"] == 3_000_000 + 12_000_000 + 3_000_000
    assert row["e2e_ns"] - row["ttft_ns"] == 49 * 10_100_000
    assert row["tpot_ns"] == 10_100_000


@pytest.mark.parametrize("policy", ["round-robin", "random", "least-load", "power-of-two", "prefix-aware", "session-affinity"])
def test_every_policy_conserves(policy: str) -> None:
    result = run(scenario(policy=policy))
    counts = result.summary["requests"]
    assert counts["finished"] == counts["sent"] > 300
    assert sum(engine["routed"] for engine in result.summary["engines"]) == counts["sent"]
    assert all(engine["routed"] for engine in result.summary["engines"])


def test_everything_at_once_conserves() -> None:
    """Tiny pools, time-outs, retries, hedging, aborts, and every kind of fault."""
    kinds = ("crash", "kill", "silent", "stall", "pause", "reset_cache")
    faults = [{"at": f"{1 + at}s", "engine": at % 4, "kind": kind, "duration": "1500ms"} for at, kind in enumerate(kinds)]
    result = run(
        scenario(
            engines=[{"count": 4, "config": {**TINY_POOL, "max_num_queued_reqs": 24}}],
            clients={
                "timeout": "4s",
                "ttft_timeout": "2s",
                "retries": 3,
                "retry_budget": 1,
                "hedge_after": "300ms",
                "abort": {"share": 0.3, "tokens": 3},
            },
            faults=faults,
            network={"jitter": "300us", "health_interval": "200ms"},
        )
    )
    counts, attempts = result.summary["requests"], result.summary["attempts"]
    assert counts["in_flight"] == 0 and counts["aborted"] > 50 and counts["finished"] > 100
    assert attempts["retries"] and attempts["hedges"] and attempts["failed"] and attempts["refused"]
    assert sum(engine["sequences"]["lost"] for engine in result.summary["engines"]) > 0


@pytest.mark.parametrize("abort", [{"when": "tokens", "tokens": 5}, {"when": "time", "after": "40ms"}, {"when": "queued"}])
def test_aborts_end_calls_and_free_engines(abort: dict[str, object]) -> None:
    cluster = Cluster(scenario(clients={"abort": {"share": 1.0, **abort}}))
    counts = cluster.run().summary["requests"]
    assert counts["aborted"] == counts["sent"] - counts["finished"] and counts["aborted"] > 0.9 * counts["sent"]
    assert all(not replica.engine.live() for replica in cluster.replicas)
    if abort["when"] == "tokens":
        received = [json.loads(row)["attempts"][0]["tokens"] for row in cluster.recorder.rows]
        assert max(received) >= 5 and min(received) >= 5


def test_crash_without_restart_leaves_the_rest() -> None:
    result = run(scenario(faults=[{"at": "3s", "engine": 1, "kind": "crash"}]))
    counts = result.summary["requests"]
    assert counts["failed"] > 0 and counts["failed"] + counts["finished"] == counts["sent"]
    assert result.summary["engines"][1]["routed"] < result.summary["engines"][0]["routed"] / 2


def test_in_flight_is_counted_when_the_drain_is_too_short() -> None:
    result = run(scenario(drain="0ms", duration="3s"))
    counts = result.summary["requests"]
    assert counts["in_flight"] > 0 and counts["finished"] + counts["in_flight"] == counts["sent"]


def test_prefix_aware_finds_shared_prefixes() -> None:
    shared = {
        "workload": {"rate": 40, "shared_prefix_tokens": 512, "prefix_groups": 8, "prompt_tokens": 32, "output_tokens": 8}
    }
    cached = {
        policy: run(scenario(policy=policy, **shared)).summary["prefix_cache"]["cached_tokens"]
        for policy in ("prefix-aware", "random")
    }
    assert cached["prefix-aware"] > cached["random"] > 0


def test_conversations_grow_and_hit_the_cache() -> None:
    workload = {"kind": "multiturn", "rate": 5, "turns": 3, "prompt_tokens": 64, "output_tokens": 32, "think": "200ms"}
    result = run(scenario(workload=workload, policy="session-affinity", duration="30s"))
    rows = [json.loads(row) for row in result.rows]
    third = [row for row in rows if row["turn"] == 2]
    assert third and all(row["prompt_tokens"] == 3 * 64 + 2 * 32 for row in third)
    assert all(row["attempts"][0]["cached_tokens"] >= 144 for row in third)
