"""`windtunnel sim` from the command line: files, JSON, sweeps, errors."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.sim.swarm import random_scenario, run_seed

FLAGS = ["sim", "--engines", "2", "--rate", "20", "--duration", "5s", "--output-tokens", "20"]


def test_one_run_writes_its_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*FLAGS, "--policy", "prefix-aware", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == summary["requests"]["sent"] and {row["outcome"] for row in rows} == {"finished"}
    report = (tmp_path / "report.html").read_text()
    assert report.count("<polyline") == 4 and "http://" not in report and "https://" not in report
    assert "vllm:request_success_total" in (tmp_path / "metrics" / "engine-1.txt").read_text()
    assert json.loads((tmp_path / "scenario.json").read_text())["policy"] == "prefix-aware"
    _check_timeline(json.loads((tmp_path / "timeline.json").read_text()), rows)


def _check_timeline(timeline: dict[str, list[dict[str, object]]], rows: list[dict[str, object]]) -> None:
    """Every request has its spans, and they touch."""
    spans: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X":
            lane = spans.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["dur"]))  # type: ignore[arg-type]
    assert len(spans) == len(rows)
    for lane in spans.values():
        assert len(lane) >= 3
        for (start, length), (following, _) in pairwise(lane):
            assert start + length == pytest.approx(following)


def test_sweep_is_the_same_on_one_core_and_on_two(tmp_path: Path) -> None:
    flags = [*FLAGS, "--json", "--sweep", "workload.rate=5,30", "--sweep", "policy=random,least-load"]
    one = CliRunner().invoke(app, [*flags, "--jobs", "1"])
    two = CliRunner().invoke(app, [*flags, "--jobs", "2", "--out", str(tmp_path)])
    assert one.exit_code == two.exit_code == 0, one.output + two.output
    assert json.loads(one.stdout) == json.loads(two.stdout)
    points = [row["point"] for row in json.loads(one.stdout)["sweep"]]
    assert points == [{"workload.rate": rate, "policy": policy} for rate in (5, 30) for policy in ("random", "least-load")]
    assert (tmp_path / "run-0003" / "report.html").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "best"], "policy is 'best'"),
        (["--duration", "10"], "is not a duration"),
        (["--set", "engines.0.config.max_num_seq=3"], "engines.config: "),
        (["--set", "workload.rate"], "write KEY=VALUE"),
        (["--sweep", "workload.rate"], "write KEY=A,B,C"),
        (["--sweep", "seed=1,2", "--on", "moon"], "must be processes or ray"),
        (["--set", "engines.0.kind=trt"], "engines.kind is 'trt'"),
        (["nowhere.toml"], "No such file"),
    ],
)
def test_usage_errors(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["sim", *flags])
    assert result.exit_code == 2
    assert said in result.stderr


def test_text_for_people() -> None:
    result = CliRunner().invoke(app, [*FLAGS, "--abort-share", "0.5"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("requests   sent ") and "aborted" in result.stdout


def test_swarm_seeds_replay() -> None:
    assert random_scenario(11) == random_scenario(11)
    first = run_seed(11)
    assert first == run_seed(11) and first["checks"] > 10
