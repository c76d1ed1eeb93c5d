"""vLLM's prefill and decode engines in the simulated world, behind a router that runs the legs one after the other."""

import json
from typing import Any

import pytest

from windtunnel.core.units import MS, S
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.sim.cluster import Cluster, RunResult, run
from windtunnel.sim.policies import BUILT_IN
from windtunnel.sim.scenario import Scenario, ScenarioError, parse_scenario
from windtunnel.sim.sidecar import SidecarRouter

WORKLOAD = {"rate": 20, "prompt_tokens": "uniform:20:300", "output_tokens": "uniform:5:60"}
ALONE: dict[str, Any] = {
    "network": {"client_router": "1ms", "router_engine": "2ms", "engine_engine": "5ms", "bandwidth_mbit": 1e12},
    "workload": {"kind": "closed", "users": 1, "requests": 1, "prompt_tokens": 160, "output_tokens": 20},
}
"""One request, on wires whose bytes cost nothing."""
CONNECTORS = ("NixlConnector", "MooncakeConnector")


def pd(sizes: tuple[int, int] = (2, 3), disagg: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    config = changes.pop("config", {})
    common = {"config": config, "disagg": disagg or {}, "transfer": changes.pop("transfer", {})}
    engines = [{**common, "role": role, "count": count} for role, count in zip(("prefill", "decode"), sizes, strict=True)]
    return parse_scenario({"engines": engines, "workload": WORKLOAD, "duration": "5s", "policy": "pd-pairs", **changes})


def legs_of(result: RunResult) -> dict[str, dict[str, int]]:
    legs: dict[str, dict[str, int]] = result.summary["pd"]["legs"]
    return legs


def run_to_nothing(scenario: Scenario) -> tuple[Cluster, RunResult]:
    """Run, and see that no engine and no router holds anything afterwards."""
    cluster = Cluster(scenario)
    result = cluster.run()
    for replica in cluster.replicas:
        engine = replica.engine
        assert isinstance(engine, ConnectorEngine)
        assert not engine.live() and not any(engine.outstanding().values())
        pool = engine._scheduler.pool
        assert pool.free_blocks == pool.usable_blocks
    assert not isinstance(cluster.router, SidecarRouter) or not cluster.router._next
    for counts in legs_of(result).values():
        assert not counts["in_flight"] and not counts["on_the_way"]
    return cluster, result


def counter(result: RunResult, name: str) -> float:
    lines = [line for text in result.metrics for line in text.decode().splitlines() if line.startswith(f"vllm:{name}_total{{")]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize("policy", [*BUILT_IN, "pd-pairs"])
def test_every_policy_ends_every_request_once_on_each_leg(policy: str) -> None:
    _cluster, result = run_to_nothing(pd(policy=policy))
    counts, wires = result.summary["requests"], result.summary["pd"]["wires"]
    assert counts["finished"] == counts["sent"] > 60
    for leg in legs_of(result).values():
        assert leg["sent"] == leg["submitted"] == leg["finished"] == counts["sent"]
    assert wires["consumed_sent"] == counts["sent"] >= wires["moves_done"] > 60
    assert counter(result, "nixl_num_kv_expired_reqs") == counter(result, "nixl_num_failed_transfers") == 0
    assert counter(result, "external_prefix_cache_hits") > 0


def test_push_does_the_same() -> None:
    _cluster, result = run_to_nothing(pd(disagg={"connector": "NixlPushConnector"}))
    counts = result.summary["requests"]
    assert counts["finished"] == counts["sent"] == result.summary["pd"]["wires"]["pushed_sent"]


def test_a_lone_request_takes_what_its_parts_take() -> None:
    """The prefill step; back and forth between router and engines; handshake, read, and one step for the last token."""
    row = json.loads(run(pd((1, 1), **ALONE)).rows[0])
    prefill_ns = 10 * MS + 160 * MS // 50
    read_ns = MS // 10 + 160 * 131072 // 10
    first_ns = (3 + 2 + 2) * MS + prefill_ns + 2 * 5 * MS + read_ns + 10 * MS + MS // 50 + 3 * MS
    assert row["ttft_ns"] == pytest.approx(first_ns, abs=1000)
    assert row["tpot_ns"] == 10.1 * MS


def test_who_leaves_between_the_legs_leaves_a_hold_behind() -> None:
    """Reference §9.7, entry 92: nobody tells the prefill, so its lease runs out."""
    clients = {"abort": {"share": 0.6, "when": "time", "after": "16ms"}}
    _cluster, result = run_to_nothing(pd(clients=clients))
    left = result.summary["pd"]["wires"]["left_between_the_legs"]
    assert left > 0 and counter(result, "nixl_num_kv_expired_reqs") >= left
    counts = result.summary["requests"]
    assert counts["aborted"] > 20 and counts["aborted"] + counts["finished"] == counts["sent"]


def test_who_leaves_during_decoding_costs_no_lease() -> None:
    clients = {"abort": {"share": 0.6, "when": "tokens", "tokens": 3}}
    _cluster, result = run_to_nothing(pd(clients=clients))
    assert result.summary["requests"]["aborted"] > 20 and counter(result, "nixl_num_kv_expired_reqs") == 0


def test_a_slow_router_reads_what_is_not_there_any_more() -> None:
    """Entry 42: the decode leg comes after the lease, and the prefill's few blocks have gone round. Everybody answers 200."""
    few = {"num_blocks": 300, "max_model_len": 1024}
    scenario = pd((1, 1), pd={"lag": "40s"}, config=few, workload={**WORKLOAD, "rate": 1}, duration="90s")
    _cluster, result = run_to_nothing(scenario)
    counts, wires = result.summary["requests"], result.summary["pd"]["wires"]
    assert counts["finished"] == counts["sent"] and wires["foreign_reads"] > 0
    assert (
        counter(result, "nixl_num_notifications_after_expiry") == counter(result, "nixl_num_kv_expired_reqs") == counts["sent"]
    )


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("engine", [0, 2])
def test_a_dead_peer_costs_its_requests_and_no_more(engine: int, connector: str) -> None:
    """Mooncake's decode does not notice that its prefill is gone; a restarted prefill is another engine, and is found."""
    faults = [{"at": "2s", "engine": engine, "kind": "crash", "duration": "500ms"}]
    crowded: dict[str, Any] = {
        "network": {"health_interval": "100ms"},
        "workload": {**WORKLOAD, "rate": 90},
        "clients": {"retries": 5, "retry_budget": 1},
        "transfer": {"dead_peer": "1s"},
    }
    _cluster, result = run_to_nothing(pd(disagg={"connector": connector}, faults=faults, **crowded))
    counts = result.summary["requests"]
    assert counts["finished"] == counts["sent"]
    assert legs_of(result)["prefill" if engine == 0 else "decode"]["lost"] > 0


def test_lost_words_end_in_expired_leases() -> None:
    faults = [{"at": "1s", "engine": 3, "kind": "lose_frames", "duration": "1s"}]
    _cluster, result = run_to_nothing(pd(faults=faults))
    counts = result.summary["requests"]
    assert counts["finished"] == counts["sent"]
    assert counter(result, "nixl_num_kv_expired_reqs") == result.summary["pd"]["wires"]["frames_lost"] > 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_transfers_follow_the_policy(policy: str) -> None:
    faults = [{"at": "1s", "engine": 0, "kind": "fail_writes", "duration": "1s"}]
    _cluster, result = run_to_nothing(pd(disagg={"load_failure_policy": policy}, faults=faults))
    counts, failed = result.summary["requests"], result.summary["pd"]["wires"]["moves_failed"]
    assert counts["failed"] == (failed if policy == "fail" else 0) and failed > 0
    assert counter(result, "nixl_num_failed_transfers") == failed == counter(result, "nixl_num_kv_expired_reqs")


def test_a_stalled_transfer_holds_the_decode_s_blocks_for_good() -> None:
    """Nothing in vLLM limits it."""
    faults = [{"at": "1s", "engine": 0, "kind": "stall_writes", "duration": "300ms"}]
    scenario = pd((1, 1), faults=faults, clients={"timeout": "20s"})
    cluster = Cluster(scenario)
    result = cluster.run()
    stalled = result.summary["pd"]["wires"]["stall_writes"]
    decode = cluster.replicas[1].engine
    assert isinstance(decode, ConnectorEngine)
    assert decode.outstanding()["orphaned_loads"] == stalled == result.summary["requests"]["timed_out"] > 0


@pytest.mark.parametrize("connector", CONNECTORS)
def test_same_seed_same_bytes(connector: str) -> None:
    faults = [
        {"at": "1s", "engine": 0, "kind": "crash", "duration": "300ms"},
        {"at": "2s", "engine": 2, "kind": "lose_frames", "duration": "1s", "share": 0.3},
        {"at": "3s", "engine": 1, "kind": "silent", "duration": "1s"},
    ]
    clients = {"retries": 2, "abort": {"share": 0.3}}
    scenario = pd(disagg={"connector": connector}, faults=faults, network={"jitter": "1ms"}, clients=clients, policy="random")
    first, second = run(scenario), run(scenario)
    assert first.rows == second.rows and first.summary == second.summary
    assert first.timeline.text() == second.timeline.text()


def test_pacing_by_request_runs_the_plain_engine() -> None:
    scenario = pd()
    engines = [
        spec.model_copy(update={"pacing": spec.pacing.model_copy(update={"model": "request"})}) for spec in scenario.engines
    ]
    _cluster, result = run_to_nothing(scenario.model_copy(update={"engines": tuple(engines)}))
    assert result.summary["requests"]["finished"] == result.summary["requests"]["sent"]


@pytest.mark.parametrize(
    ("disagg", "said"),
    [
        ({"lease": 1}, "lease is not one of"),
        ({"lease_ns": 0}, r"engines\.disagg"),
        ({"engine_id": "x"}, "engine_id is not one of"),
        ({"connector": "Mooncake"}, "connector is 'Mooncake'"),
        ({"connector": "MooncakeConnector", "ordered_reaper": True}, "ordered_reaper is not supported by MooncakeConnector"),
    ],
)
def test_settings_are_checked(disagg: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        Cluster(pd(disagg=disagg))


def test_ranks_that_could_not_be_paired_are_refused() -> None:
    scenario = pd()
    prefill, decode = scenario.engines
    ranks = prefill.model_copy(update={"tp": 3}), decode.model_copy(update={"tp": 2})
    with pytest.raises(ScenarioError, match="Remote tensor parallel size 3 is not divisible by local tensor parallel size 2"):
        Cluster(scenario.model_copy(update={"engines": ranks}))


def test_durations_may_have_units() -> None:
    cluster = Cluster(pd(disagg={"lease_ns": "12s"}))
    engine = cluster.replicas[0].engine
    assert isinstance(engine, ConnectorEngine) and engine.connector.config.lease_ns == 12 * S
