"""vLLM's prefill and decode engines with Mooncake in the simulated world: both legs at once, under one transfer id."""

import json
from typing import Any

import pytest
from tests.sim.test_kv_pd import ALONE, counter, legs_of, run_to_nothing
from tests.sim.test_kv_pd import pd as kv_pd

from windtunnel.core.units import MS, S
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.sim.cluster import Cluster, RunResult, run
from windtunnel.sim.scenario import Scenario, ScenarioError

PROXY = {"aborts": "decode", "cancel_peer": False}
"""What vLLM's example proxy does: prefill legs belong to nobody."""


def pd(sizes: tuple[int, int] = (2, 3), disagg: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    return kv_pd(sizes, {"connector": "MooncakeConnector", **(disagg or {})}, **changes)


def troubles(result: RunResult) -> dict[str, float]:
    names = ("failed_transfers", "failed_recvs", "kv_expired_reqs")
    return {name: number for name in names if (number := counter(result, f"mooncake_num_{name}"))}


@pytest.mark.parametrize("policy", ["pd-pairs", "round-robin", "least-load"])
def test_every_request_ends_once_on_each_leg(policy: str) -> None:
    _cluster, result = run_to_nothing(pd(policy=policy))
    counts, wires = result.summary["requests"], result.summary["pd"]["wires"]
    assert counts["finished"] == counts["sent"] > 60
    for leg in legs_of(result).values():
        assert leg["sent"] == leg["submitted"] == leg["finished"] == counts["sent"]
    assert wires["pulled_sent"] == wires["moves_done"] == counts["sent"] >= wires["pulls_sent"]
    assert troubles(result) == {} and counter(result, "external_prefix_cache_hits") > 0


def test_a_lone_request_takes_what_its_parts_take() -> None:
    """The prefill has ended before the decode's pull is there: bootstrap server, pull, write, answer, one step."""
    row = json.loads(run(pd((1, 1), **ALONE)).rows[0])
    assert 10 * MS + 160 * MS // 50 < 3 * 5 * MS, "the prefill is not that fast"
    write_ns = MS // 10 + 160 * 131072 // 10
    first_ns = 3 * MS + 3 * 5 * MS + write_ns + 5 * MS + 10 * MS + MS // 50 + 3 * MS
    assert row["ttft_ns"] == pytest.approx(first_ns, abs=1000)
    assert row["tpot_ns"] == 10.1 * MS


def leaving(share: float) -> dict[str, Any]:
    """So many leave while the prefill computes and the decode waits."""
    return {"clients": {"abort": {"share": share, "when": "time", "after": "8ms"}}}


def test_who_leaves_while_the_decode_waits_costs_its_blocks_for_the_whole_patience() -> None:
    """The prefill leg is aborted too, and nobody tells the decode. What stands in line at the prefill is patient after that."""
    cluster = Cluster(pd(drain="400s", **leaving(0.6)))
    cluster.run()
    engines = [replica.engine for replica in cluster.replicas]
    left = [engine.outstanding() for engine in engines if isinstance(engine, ConnectorEngine)]
    assert sum(one["pulls"] for one in left) >= sum(one["orphaned_loads"] for one in left) > 20
    _cluster, result = run_to_nothing(pd(drain="1h", **leaving(0.6)))
    counts = result.summary["requests"]
    assert counts["aborted"] > 20 and counts["aborted"] + counts["finished"] == counts["sent"]
    assert troubles(result).keys() == {"failed_recvs"}


def test_who_leaves_behind_the_example_proxy_costs_nothing() -> None:
    """Its prefill legs go on, and so there is something to write."""
    _cluster, result = run_to_nothing(pd(drain="10s", pd=PROXY, **leaving(0.6)))
    assert result.summary["requests"]["aborted"] > 20 and troubles(result) == {}


@pytest.mark.parametrize("engine", [3, 0], ids=["a decode's pulls", "a prefill's answers"])
def test_lost_words_cost_the_decode_s_patience(engine: int) -> None:
    faults = [{"at": "1s", "engine": engine, "kind": "lose_frames", "duration": "1s"}]
    _cluster, result = run_to_nothing(pd(faults=faults))
    counts, lost = result.summary["requests"], result.summary["pd"]["wires"]["frames_lost"]
    assert counts["failed"] == troubles(result)["failed_recvs"] >= lost > 0
    assert counts["failed"] + counts["finished"] == counts["sent"]
    assert run(pd(faults=faults, drain="530s")).summary["requests"]["in_flight"] == counts["failed"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_transfers_follow_the_policy(policy: str) -> None:
    faults = [{"at": "1s", "engine": 0, "kind": "fail_writes", "duration": "1s"}]
    _cluster, result = run_to_nothing(pd(disagg={"load_failure_policy": policy}, faults=faults))
    counts, failed = result.summary["requests"], result.summary["pd"]["wires"]["moves_failed"]
    assert counts["failed"] == (failed if policy == "fail" else 0) and failed > 0
    assert troubles(result) == {"failed_transfers": failed, "failed_recvs": failed, "kv_expired_reqs": failed}


def test_few_workers_make_a_prefill_s_pulls_stand_in_line() -> None:
    """Pulls that wait for an aborted prefill keep their places, and good ones stand behind them."""
    slowest = {}
    for workers in (1, 10):
        result = run(pd((1, 2), disagg={"num_workers": workers, "abort_timeout_ns": "2s"}, **leaving(0.2)))
        slowest[workers] = result.summary["ttft"]["max_ms"]
    assert slowest[10] < 100 and slowest[1] > 1000


def test_patience_is_vllm_s_unless_told() -> None:
    for told, wanted_ns in (({}, 480 * S), ({"abort_timeout_ns": "3s"}, 3 * S)):
        engine = Cluster(pd(disagg=told)).replicas[0].engine
        assert isinstance(engine, ConnectorEngine) and engine.connector.config.hold_ns == wanted_ns


def test_prefills_and_decodes_must_have_one_connector() -> None:
    scenario = pd()
    prefill, decode = scenario.engines
    mixed = scenario.model_copy(update={"engines": (prefill, decode.model_copy(update={"disagg": {}}))})
    with pytest.raises(ScenarioError, match="the connectors are MooncakeConnector, NixlConnector: prefill and decode must"):
        Cluster(mixed)


@pytest.mark.parametrize(
    ("disagg", "message"),
    [
        ({"num_workers": "x"}, "num_workers is 'x': must be a whole number, at least 1"),
        ({"num_workers": True}, "num_workers is True: must be a whole number"),
        ({"pull_margin_ns": float("nan")}, "pull_margin_ns is nan: must be a whole number, at least 0"),
        ({"abort_timeout_ns": float("inf")}, "abort_timeout_ns is inf: must be a whole number, at least 1"),
        ({"connector": "Moon"}, "connector is 'Moon': must be one of NixlConnector"),
    ],
)
def test_what_a_connector_cannot_be_is_named(disagg: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=f"engines.disagg: {message}"):
        Cluster(pd(disagg=disagg))
