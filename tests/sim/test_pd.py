"""SGLang in the simulated world: unified engines, and prefill and decode workers with wires between them."""

import json
from typing import Any

import pytest
from tests.sim.test_kv_pd import ALONE, WORKLOAD

from windtunnel.core.sglang.disagg.worker import DisaggWorker
from windtunnel.core.units import MS, S
from windtunnel.core.vllm.connector.config import MOONCAKE
from windtunnel.sim.cluster import Cluster, RunResult, run
from windtunnel.sim.pairs import PairRouter
from windtunnel.sim.policies import BUILT_IN
from windtunnel.sim.router import Router
from windtunnel.sim.scenario import Scenario, ScenarioError, parse_scenario
from windtunnel.sim.swarm import random_scenario, run_seed

CONFIG = {"page_size": 16, "max_total_num_tokens": 65536}
SHORT = {"waiting_timeout_ns": "2s", "bootstrap_timeout_ns": "2s", "transferring_timeout_ns": "2s", "tombstones": True}


def unified(**changes: Any) -> Scenario:
    engines = [{"kind": "sglang", "count": 3, "config": CONFIG}]
    return parse_scenario({"engines": engines, "workload": WORKLOAD, "duration": "5s", **changes})


def pd(sizes: tuple[int, int] = (2, 3), disagg: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    common = {"kind": "sglang", "config": CONFIG, "disagg": {**SHORT, **(disagg or {})}}
    engines = [{**common, "role": role, "count": count} for role, count in zip(("prefill", "decode"), sizes, strict=True)]
    return parse_scenario({"engines": engines, "workload": WORKLOAD, "duration": "5s", "policy": "pd-pairs", **changes})


def legs_of(result: RunResult) -> dict[str, dict[str, int]]:
    legs: dict[str, dict[str, int]] = result.summary["pd"]["legs"]
    return legs


def run_to_nothing(scenario: Scenario) -> tuple[Cluster, RunResult]:
    """Run, and see that no worker holds anything afterwards."""
    cluster = Cluster(scenario)
    result = cluster.run()
    for replica in cluster.replicas:
        assert isinstance(replica.engine, DisaggWorker)
        assert not any(replica.engine.outstanding().values()), replica.engine.outstanding()
    for role, counts in legs_of(result).items():
        ends = ("finished", "aborted", "failed", "lost")
        assert counts["sent"] == counts["not_entered"] + counts["refused"] + sum(counts[end] for end in ends), role
        assert not counts["in_flight"] and not counts["on_the_way"]
    return cluster, result


@pytest.mark.parametrize("policy", ["round-robin", "prefix-aware"])
def test_unified_engines_conserve(policy: str) -> None:
    result = run(unified(policy=policy, clients={"abort": {"share": 0.3, "tokens": 3}}))
    counts = result.summary["requests"]
    assert counts["finished"] + counts["aborted"] == counts["sent"] > 60 and counts["aborted"]
    assert all(b"sglang:prompt_tokens_total" in text for text in result.metrics)


def test_prefix_aware_reads_the_events_of_sglang() -> None:
    workload = {**WORKLOAD, "shared_prefix_tokens": 512, "prefix_groups": 6}
    cached = {
        policy: run(unified(policy=policy, workload=workload)).summary["prefix_cache"]["cached_tokens"]
        for policy in ("prefix-aware", "random")
    }
    assert cached["prefix-aware"] > 1.1 * cached["random"] > 0


@pytest.mark.parametrize("policy", [*BUILT_IN, "pd-pairs"])
def test_every_policy_ends_every_request_once_on_each_leg(policy: str) -> None:
    _cluster, result = run_to_nothing(pd(policy=policy))
    counts = result.summary["requests"]
    assert counts["finished"] == counts["sent"] > 60
    for leg in legs_of(result).values():
        assert leg["sent"] == leg["submitted"] == leg["finished"] == counts["sent"]
    assert all(engine["routed"] for engine in result.summary["engines"])


def test_a_lone_request_takes_what_its_parts_take() -> None:
    """Topology and its answer, metadata, the prefill step, the write, the notice of success; then a step for each token."""
    row = json.loads(run(pd((1, 1), **ALONE)).rows[0])
    write_ns = MS // 10 + 160 * 131072 // 10
    prefill_ns = 10 * MS + 160 * MS // 50
    assert row["ttft_ns"] == pytest.approx((3 + 5 + 5 + 5) * MS + prefill_ns + write_ns + (5 + 3) * MS, abs=1000)
    assert row["tpot_ns"] == 10.1 * MS


def test_pairs_stay_together() -> None:
    """Three decodes share two prefills: 0 with 0, 1 with 1, 2 with 0."""
    rows = [json.loads(row) for row in run(pd()).rows]
    pairs = {(attempt["prefill"], attempt["engine"]) for row in rows for attempt in row["attempts"]}
    assert pairs == {(0, 2), (1, 3), (0, 4)}


@pytest.mark.parametrize("aborts", ["both", "prefill", "decode", "none"])
def test_whichever_leg_hears_of_an_abort_both_end(aborts: str) -> None:
    clients = {"abort": {"share": 0.6, "when": "time", "after": "25ms"}}
    _cluster, result = run_to_nothing(pd(pd={"aborts": aborts}, clients=clients))
    counts, legs = result.summary["requests"], legs_of(result)
    assert counts["aborted"] > 20
    ended_early = {role: leg["aborted"] + leg["failed"] for role, leg in legs.items()}
    assert (ended_early["decode"] > 0) == (aborts != "none")
    assert not result.summary["pd"]["wires"]["late_writes"]


@pytest.mark.parametrize("engine", [0, 2])
def test_a_dead_peer_costs_its_requests_and_no_more(engine: int) -> None:
    """A prefill or a decode worker crashes and comes back; clients try again."""
    faults = [{"at": "2s", "engine": engine, "kind": "crash", "duration": "500ms"}]
    crowded: dict[str, Any] = {
        "network": {"health_interval": "100ms"},
        "workload": {**WORKLOAD, "rate": 90},
        "clients": {"retries": 5, "retry_budget": 1},
    }
    _cluster, result = run_to_nothing(pd(faults=faults, **crowded))
    counts, attempts = result.summary["requests"], result.summary["attempts"]
    assert counts["finished"] == counts["sent"]
    assert attempts["failed"] > 0
    assert legs_of(result)["prefill" if engine == 0 else "decode"]["lost"] > 0


def test_lost_frames_end_in_time_outs() -> None:
    faults = [{"at": "1s", "engine": 3, "kind": "lose_frames", "duration": "1s"}]
    _cluster, result = run_to_nothing(pd(faults=faults))
    counts = result.summary["requests"]
    assert result.summary["pd"]["wires"]["frames_lost"] > 0
    failures = [line for text in result.metrics for line in text.decode().splitlines() if "transfer_failed_reqs_total{" in line]
    assert sum(float(line.split()[-1]) for line in failures) > 0
    assert 0 < counts["failed"] < counts["sent"] / 2 and counts["failed"] + counts["finished"] == counts["sent"]


def test_late_frames_delay_and_lose_nothing() -> None:
    faults = [{"at": "1s", "engine": 3, "kind": "late_frames", "duration": "1s", "share": 0.5, "late": "200ms"}]
    _cluster, result = run_to_nothing(pd(faults=faults))
    assert result.summary["pd"]["wires"]["frames_late"] > 0
    assert result.summary["requests"]["finished"] == result.summary["requests"]["sent"]
    assert result.summary["ttft"]["max_ms"] > 200


@pytest.mark.parametrize(("kind", "pinned"), [("stall_writes", True), ("fail_writes", False)])
def test_a_stalled_write_pins_its_prefill_leg_for_good(kind: str, pinned: bool) -> None:
    """Releases have no limit for Transferring (P26): after the decode has given up, the prefill leg stays, unless the router
    closes it.
    """
    apart = {"cancel_peer": False}
    faults = [{"at": "1s", "engine": 0, "kind": kind, "duration": "300ms"}]
    scenario = pd((1, 1), {"profile": "0.5.12", "transferring_timeout_ns": "1h", "tombstones": False}, faults=faults, pd=apart)
    cluster = Cluster(scenario)
    result = cluster.run()
    prefill = legs_of(result)["prefill"]
    assert result.summary["requests"]["failed"] > 0 and not result.summary["requests"]["in_flight"]
    assert (prefill["in_flight"] > 0) == pinned
    assert prefill["submitted"] == prefill["finished"] + prefill["failed"] + prefill["aborted"] + prefill["in_flight"]


def test_a_silent_prefill_is_missed_by_heartbeats_and_keeps_rooms() -> None:
    faults = [{"at": "1s", "engine": 0, "kind": "silent", "duration": "8s"}]
    """What was held reaches the prefill after all: metadata for requests whose prefill legs are closed by then. Their rooms
    stay for good (P54).
    """
    cluster = Cluster(pd((1, 1), {"heartbeat_interval_ns": "2s", "waiting_timeout_ns": "60s"}, faults=faults))
    result = cluster.run()
    assert result.summary["pd"]["wires"]["prefills_lost"] == 1
    assert result.summary["requests"]["failed"] > 0
    prefill = cluster.replicas[0].engine
    assert isinstance(prefill, DisaggWorker)
    assert prefill.outstanding()["stray_rooms"] == legs_of(result)["prefill"]["not_entered"] > 0


def test_same_seed_same_bytes() -> None:
    faults = [
        {"at": "1s", "engine": 0, "kind": "crash", "duration": "300ms"},
        {"at": "2s", "engine": 2, "kind": "lose_frames", "duration": "1s", "share": 0.3},
    ]
    scenario = pd(faults=faults, network={"jitter": "1ms"}, clients={"retries": 2, "abort": {"share": 0.3}}, policy="random")
    first, second = run(scenario), run(scenario)
    assert first.rows == second.rows and first.summary == second.summary
    assert first.timeline.text() == second.timeline.text()


def test_a_policy_file_may_choose_pairs(tmp_path: Any) -> None:
    file = tmp_path / "last.py"
    file.write_text(
        "class Last:\n"
        "    def choose_pair(self, request, prefills, decodes):\n"
        "        return prefills[-1], decodes[-1]\n"
        "    def on_kv_events(self, engine, events):\n"
        "        pass\n"
        "def make_policy(context):\n"
        "    return Last()\n"
    )
    result = run(pd(policy_file=str(file)))
    assert [engine["routed"] > 0 for engine in result.summary["engines"]] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engines": [{"kind": "sglang", "role": "prefill"}]}, "all unified, or prefill and decode"),
        ({"engines": [{"kind": "sglang"}], "policy": "pd-pairs"}, "needs engines with role prefill"),
        ({"engines": [{"role": "prefill"}, {"role": "decode", "kind": "sglang"}]}, "must be of one kind"),
        ({"engines": [{"kind": "sglang"}], "faults": [{"at": "1s", "engine": 0, "kind": "lose_frames"}]}, "needs a prefill"),
        ({"engines": [{"kind": "sglang"}], "faults": [{"at": "1s", "engine": 0, "kind": "sleep"}]}, "cannot sleep"),
        ({"engines": [{"kind": "sglang", "config": {"max_num_seqs": 4}}]}, "engines.config"),
    ],
)
def test_scenarios_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        Cluster(parse_scenario(changes))


@pytest.mark.parametrize("disagg", [{"profile": "0.3.0"}, {"endpoints": ["a:1"]}, {"waiting_timeout_ns": 0}])
def test_disaggregation_settings_are_checked(disagg: dict[str, Any]) -> None:
    with pytest.raises(ScenarioError, match=r"engines\.disagg"):
        Cluster(pd(disagg=disagg))


def test_the_front_end_reads_one_request_after_another() -> None:
    """Two questions at once: the second waits for the first, the latency comes once on top."""
    frontend = {"request": "3ms", "prompt_token": "10us", "latency": "2ms"}
    scenario = parse_scenario(
        {
            "engines": [{"config": {"max_num_seqs": 1}, "frontend": frontend}],
            "network": {"client_router": "0", "router_engine": "0", "bandwidth_mbit": 1e12},
            "workload": {"kind": "closed", "users": 2, "requests": 2, "prompt_tokens": 100, "output_tokens": 1},
        }
    )
    rows = [json.loads(row) for row in run(scenario).rows]
    assert rows[0]["ttft_ns"] == (3 + 1 + 2) * MS + 12 * MS
    alone = scenario.model_copy(update={"engines": (scenario.engines[0].model_copy(update={"config": {}}),)})
    late = [json.loads(row)["ttft_ns"] for row in run(alone).rows]
    assert late[0] == 18 * MS and late[1] == 30 * MS


# The swarm


def _seed(shape: str, *, sound: bool = True) -> int:
    """The first seed with this kind of cluster."""
    for seed in range(1000):
        engines = random_scenario(seed).engines
        names = {"vllm": "vllm-pd", "sglang": "pd"}
        kind = names[engines[0].kind] if engines[0].role == "prefill" else engines[0].kind
        kind += "-mooncake" if engines[0].disagg.get("connector") == MOONCAKE else ""
        if kind == shape and (kind != "pd" or ("tombstones" in engines[0].disagg) == sound):
            return seed
    raise AssertionError(f"no seed makes {shape}")


@pytest.mark.parametrize(
    ("shape", "sound"), [("sglang", True), ("pd", True), ("pd", False), ("vllm-pd", True), ("vllm-pd-mooncake", True)]
)
def test_swarm_seeds_replay(shape: str, sound: bool) -> None:
    seed = _seed(shape, sound=sound)
    first = run_seed(seed)
    assert first == run_seed(seed) and first["checks"] > 10


@pytest.mark.parametrize("router", [Router, PairRouter])
def test_the_swarm_notices_a_router_that_never_marks_a_request_as_cancelled(
    router: type[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = router.cancel

    def forgetful(self: Any, attempt: Any) -> None:
        cancel(self, attempt)
        attempt.cancelled = attempt.closed = False

    monkeypatch.setattr(router, "cancel", forgetful)
    with pytest.raises(AssertionError, match="for nobody"):
        _run_seeds(60)


def _run_seeds(seeds: int) -> None:
    for seed in range(seeds):
        run_seed(seed)


def test_virtual_time_has_no_hidden_end() -> None:
    """Heartbeats stop when nobody needs them: the run ends with its requests."""
    cluster = Cluster(pd((1, 1), workload={"kind": "closed", "users": 1, "requests": 1}, duration="1s", drain="1h"))
    cluster.run()
    assert cluster.kernel.events < 500 and cluster.recorder.last_end_ns < 10 * S
