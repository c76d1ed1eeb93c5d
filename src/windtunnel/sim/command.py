"""What `windtunnel sim` does: from flags to scenarios, from runs to text and files."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from windtunnel.sim.cluster import run
from windtunnel.sim.output import write_run
from windtunnel.sim.scenario import Scenario, ScenarioError, load_scenario, parse_scenario, with_overrides
from windtunnel.sim.sweep import MAX_RUNS, Point, run_points


@dataclass(frozen=True, slots=True)
class Command:
    """The command line, as plain values."""

    scenario: Path | None
    flags: Mapping[str, Any]
    sets: Sequence[str]
    sweeps: Sequence[str]
    on: str
    jobs: int | None
    as_json: bool
    out: Path | None


def run_command(command: Command) -> str:
    """The text to print. Raises ScenarioError for what cannot be run."""
    overrides = {**command.flags, **dict(_assignment(text) for text in command.sets)}
    if not command.sweeps:
        return _one(command, _scenario(command, overrides))
    points = [Point(dict(point), _scenario(command, {**overrides, **dict(point)})) for point in _points(command.sweeps)]
    rows = run_points(points, command.on, command.jobs, command.out)
    document = {"sweep": rows}
    if command.out is not None:
        (command.out / "sweep.json").write_text(json.dumps(document, indent=1))
    return json.dumps(document) if command.as_json else sweep_table(rows)


def _scenario(command: Command, overrides: Mapping[str, Any]) -> Scenario:
    if command.scenario is not None:
        return load_scenario(command.scenario, overrides)
    return parse_scenario(with_overrides({}, overrides))


def _one(command: Command, scenario: Scenario) -> str:
    result = run(scenario, keep_rows=command.out is not None)
    if command.out is not None:
        write_run(result, scenario, command.out)
    return json.dumps(result.summary) if command.as_json else summary_text(result.summary)


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ScenarioError(f"{text!r}: write KEY=VALUE")
    return key, _value(value)


def _value(text: str) -> Any:
    """As TOML would read it; what TOML cannot read is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _points(sweeps: Sequence[str]) -> list[tuple[tuple[str, Any], ...]]:
    """All combinations, the last key fastest."""
    axes: list[list[tuple[str, Any]]] = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ScenarioError(f"--sweep {text!r}: write KEY=A,B,C")
        axes.append([(key, _value(value)) for value in values.split(";" if ";" in values else ",")])
    points = list(product(*axes))
    if len(points) > MAX_RUNS:
        raise ScenarioError(f"--sweep makes {len(points)} runs: at most {MAX_RUNS}")
    return points


def summary_text(summary: Mapping[str, Any]) -> str:
    """For people: a line for each matter."""
    requests = ", ".join(f"{name} {count}" for name, count in summary["requests"].items() if count or name == "sent")
    lines = [
        f"{summary['virtual_s']:.1f} s of virtual time, {len(summary['engines'])} engines, policy {summary['policy']}, "
        f"seed {summary['seed']}",
        f"requests   {requests}",
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        row = summary[name]
        lines.append(
            f"{name:<10} p50 {row['p50_ms']:.1f}  p90 {row['p90_ms']:.1f}  p99 {row['p99_ms']:.1f}  max {row['max_ms']:.1f} ms"
        )
    good, cost, speed = summary["goodput"], summary["cost"], summary["throughput"]
    lines.append(f"goodput    {good['requests_per_s']:.2f} requests/s within the SLO ({100 * good['share']:.1f} %)")
    lines.append(f"throughput {speed['requests_per_s']:.2f} requests/s, {speed['output_tokens_per_s']:.0f} output tokens/s")
    lines.append(f"cost       {cost['gpu_hours']:.4f} GPU hours")
    return "\n".join(lines)


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each point."""
    lines = []
    for row in rows:
        point = " ".join(f"{key}={value}" for key, value in row["point"].items())
        summary = row["summary"]
        lines.append(
            f"{point}: finished {summary['requests']['finished']}/{summary['requests']['sent']}, "
            f"ttft p50 {summary['ttft']['p50_ms']:.1f} p99 {summary['ttft']['p99_ms']:.1f} ms, "
            f"itl p99 {summary['itl']['p99_ms']:.1f} ms, goodput {summary['goodput']['requests_per_s']:.2f}/s, "
            f"{summary['cost']['gpu_hours']:.4f} GPU hours"
        )
    return "\n".join(lines)
