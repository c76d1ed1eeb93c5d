"""`windtunnel calibrate` from a file to a profile that `serve` takes, and what it says about wrong calls."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.sim.calibrate.test_fit import measured
from typer.testing import CliRunner, Result

from windtunnel.cli.main import app
from windtunnel.core.profile import ProfilePacing
from windtunnel.serve.config import UsageError
from windtunnel.serve.engines import make_pacing
from windtunnel.serve.flags import parse_args


def rows_of(clients: int, count: int = 15, **fields: object) -> list[dict[str, object]]:
    return [
        {
            "concurrency": clients, "start_s": one.sent_s, "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens, "headers_ms": 2.0, "e2e_ms": one.e2e_ms, "chunks": one.chunks, **fields,
        }
        for one in measured(clients, count).requests
    ]  # fmt: skip


def trace(folder: Path, rows: Sequence[object] = (), name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows or [*rows_of(1), *rows_of(3)]), "utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_a_trace_becomes_a_profile_that_serve_takes(tmp_path: Path) -> None:
    path, out = trace(tmp_path), tmp_path / "profile.json"
    result = run(path, "--fit-concurrency", "1", "--seeds", "1", "--out", out)
    assert result.exit_code == 0, result.output
    assert "| c=1 (fitted) |" in result.stdout and "| c=3 |" in result.stdout
    assert "predictions hit" in result.stdout
    profile = parse_args(["m", "--profile", str(out)]).config.pacing.profile
    assert profile is not None and profile.source == "trace.jsonl: c=1; seed 0"


def cpu_file(folder: Path, *rows: dict[str, object], name: str = "cpu.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


def test_other_jobs_of_the_machine_are_an_input_of_fit_and_prediction(tmp_path: Path) -> None:
    path, out = trace(tmp_path), tmp_path / "profile.json"
    cpu = cpu_file(tmp_path, {"t_s": 0.5, "other_cores": 0.0, "busy_cores": 2}, {"t_s": 60, "other_cores": 1.0})
    given = ("--fit-concurrency", "1", "--seeds", "1", "--cores", "2")
    result = run(path, *given, "--out", out)
    beside = run(path, *given, "--cpu", cpu)
    assert result.exit_code == beside.exit_code == 0, beside.output
    assert result.stdout != beside.stdout
    pacing = make_pacing(parse_args(["m", "--profile", str(out), "--other-jobs", "0.5"]).config.pacing, random.Random(0))
    assert isinstance(pacing, ProfilePacing) and pacing.other_jobs.at(0) == 0.5 and pacing.profile.machine.cores == 2


@pytest.fixture
def two_passes(tmp_path: Path) -> tuple[Path, Path]:
    """Pass `a` has a lone client; pass 7, in a file of its own, has neither that nor a concurrency that is fitted."""
    first = trace(tmp_path, rows_of(1, **{"pass": "a"}), "a.jsonl")
    open_loop = rows_of(3, **{"pass": 7, "concurrency": None, "poisson_rate_rps": 5})
    return first, trace(tmp_path, [*rows_of(3, **{"pass": 7}), *open_loop], "b.jsonl")


def test_passes_without_a_run_to_fit_are_predicted_with_the_profile_of_all(
    tmp_path: Path, two_passes: tuple[Path, Path]
) -> None:
    out = tmp_path / "profile.json"
    result = run(*two_passes, "--seeds", "1", "--out", out)
    assert result.exit_code == 0, result.output
    assert [line.split(" |")[0] for line in result.stdout.splitlines() if line.startswith("| pass")] == [
        "| pass a c=1 (fitted)", "| pass 7 c=3", "| pass 7 5 rps",
    ]  # fmt: skip
    assert "--fit-concurrency: no run has 8 clients; there are pass a c=1, pass 7 c=3, pass 7 5 rps" in result.stderr
    assert "the cost of a decoding sequence is a guess" in result.stderr
    alone = run(two_passes[1], "--profile", out, "--seeds", "1")
    assert alone.exit_code == 0 and "of 16 predictions hit" in alone.stdout


def test_what_other_jobs_took_may_be_known_in_parts_and_what_is_not_is_said(
    tmp_path: Path, two_passes: tuple[Path, Path]
) -> None:
    given = (*two_passes, "--fit-concurrency", "1", "--seeds", "1", "--cores", "2")
    part = cpu_file(tmp_path, {"pass": "a", "t_s": 0.5, "other_cores": 0.0})
    result = run(*given, "--cpu", part)
    assert result.exit_code == 0, result.output
    assert "pass 7: --cpu has no line of it: its runs are taken as undisturbed" in result.stderr
    assert "pass a c=1: --cpu ends at 0.5 s and the last request is sent at" in result.stderr
    rest = cpu_file(tmp_path, {"pass": 7, "t_s": 60, "other_cores": 1.0}, name="rest.jsonl")
    both = run(*given, "--cpu", part, "--cpu", rest)
    assert both.exit_code == 0 and "pass 7" not in both.stderr
    assert both.stdout != result.stdout


def test_two_traces_with_runs_of_one_name_are_both_in_the_table(tmp_path: Path) -> None:
    twice = [trace(tmp_path, rows_of(1), name) for name in ("a.jsonl", "b.jsonl")]
    result = run(*twice, "--fit-concurrency", "1", "--seeds", "1")
    assert "| c=1 (fitted) |" in result.stdout and "| c=1 (2) (fitted) |" in result.stdout


def test_what_is_wrong_with_a_cpu_file_is_said(tmp_path: Path) -> None:
    path, out = trace(tmp_path), tmp_path / "profile.json"
    assert run(path, "--fit-concurrency", "1", "--seeds", "1", "--out", out).exit_code == 0
    good = cpu_file(tmp_path, {"t_s": 60, "other_cores": 1.0})
    assert "--cpu needs --cores" in run(path, "--cpu", good).output
    assert "profile.json does not know its machine" in run(path, "--cpu", good, "--profile", out).output
    with pytest.raises(UsageError, match="--other-jobs needs a --profile that knows its machine"):
        parse_args(["m", "--profile", str(out), "--other-jobs", "0.5"])
    for rows, message in (
        (({"t_s": 1},), "cpu.jsonl: other_cores is missing"),
        (({"t_s": 1, "other_cores": -1},), "other_cores is -1: must be a number of 0 to"),
        (({"t_s": 1, "other_cores": 0}, {"t_s": 1, "other_cores": 0}), "line 2: t_s is 1: must be above the 1"),
        (({"t_s": 1, "other_cores": 0, "pass": 3},), "--cpu has no line of a trace without passes; it has pass 3"),
    ):
        assert message in run(path, "--cores", "2", "--cpu", cpu_file(tmp_path, *rows)).output


def test_a_profile_predicts_without_a_fit_and_json_is_one_document(tmp_path: Path) -> None:
    path, out = trace(tmp_path), tmp_path / "profile.json"
    assert run(path, "--fit-concurrency", "1", "--seeds", "1", "--out", out).exit_code == 0
    result = run(path, "--profile", out, "--seeds", "1", "--json")
    document = json.loads(result.stdout)
    assert document["profile"] == json.loads(out.read_text("utf-8"))
    assert len(document["predictions"]) == 16 and not any(row["fitted"] for row in document["predictions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "csv"), "--format csv: must be auto or one of windtunnel, vllm-bench"),
        (("--concurrency", "1,2"), "--concurrency has 2 numbers for 1 traces"),
        (("--fit-concurrency", "one"), "--fit-concurrency 'one': write whole numbers with commas"),
        (("--fit-concurrency", "²"), "--fit-concurrency '²': write whole numbers with commas"),
        (("--fit-concurrency", "3"), "no run with concurrency 1 among those to fit"),
        (("--only", "nothing"), "no run is left"),
    ],
)
def test_wrong_calls_are_explained(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(trace(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere.jsonl")
    assert result.exit_code == 2 and "nowhere.jsonl: No such file" in result.output


def test_files_that_cannot_be_read_are_usage_errors_and_no_findings(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"chunks": "\xe9"}')
    result = run(tmp_path / "latin.jsonl")
    assert result.exit_code == 2 and "latin.jsonl: is not UTF-8" in result.output
    (tmp_path / "deep.json").write_text("[" * 100_000, "utf-8")
    result = run(trace(tmp_path), "--profile", tmp_path / "deep.json")
    assert result.exit_code == 2 and "deep.json: is nested too deeply" in result.output
