"""The metrics of a simulated engine are those that a live server would show, whether tokens come one by one or in runs."""

from dataclasses import replace

import pytest

from windtunnel.core.vllm import VllmEngine
from windtunnel.sim import engines
from windtunnel.sim.cluster import run
from windtunnel.sim.scenario import parse_scenario


def _one_by_one(build: engines.Build) -> VllmEngine:
    return VllmEngine(engines.vllm_config(build.spec, collect_kv_events=build.kv_events), build.pacing)


@pytest.mark.parametrize("abort_share", [0, 0.4])
def test_runs_change_nothing(monkeypatch: pytest.MonkeyPatch, abort_share: float) -> None:
    scenario = parse_scenario(
        {
            "engines": [{"count": 2, "config": {"num_blocks": 129, "max_model_len": 2048, "max_num_seqs": 12}}],
            "workload": {"rate": 12, "output_tokens": "uniform:1:150", "prompt_tokens": "uniform:10:600"},
            "clients": {"abort": {"share": abort_share, "when": "time", "after": "900ms"}, "timeout": "8s"},
            "duration": "12s",
        }
    )
    in_runs = run(scenario)
    kind = engines.KINDS["vllm"]
    monkeypatch.setattr(engines, "KINDS", {"vllm": replace(kind, make=_one_by_one)})
    one_by_one = run(scenario)
    assert in_runs.rows == one_by_one.rows
    assert {**in_runs.summary, "events": 0} == {**one_by_one.summary, "events": 0}
    for left, right in zip(in_runs.metrics, one_by_one.metrics, strict=True):
        assert _samples(left) == pytest.approx(_samples(right), rel=1e-9)
    assert b"vllm:num_preemptions_total" in in_runs.metrics[0]


def _samples(text: bytes) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _space, value in lines}
