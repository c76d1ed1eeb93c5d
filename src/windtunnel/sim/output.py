"""The files of one run."""

import json
from pathlib import Path

from windtunnel.sim.cluster import RunResult
from windtunnel.sim.report import report_html
from windtunnel.sim.results import write_lines
from windtunnel.sim.scenario import Scenario


def write_run(result: RunResult, scenario: Scenario, folder: Path) -> None:
    """`scenario.json`, `summary.json`, `requests.jsonl`, `metrics/engine-N.txt`, `timeline.json`, `report.html`."""
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    texts = {
        "scenario.json": scenario.model_dump_json(indent=1, fallback=str),
        "summary.json": json.dumps(result.summary, indent=1),
        "requests.jsonl": write_lines(result.rows),
        "timeline.json": result.timeline.text(),
        "report.html": report_html(result, scenario),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for engine, metrics in enumerate(result.metrics):
        if not metrics:
            continue
        (folder / "metrics" / f"engine-{engine}.txt").write_bytes(metrics)
