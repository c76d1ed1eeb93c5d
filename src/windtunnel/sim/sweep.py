"""Many runs of one scenario with other values, on all cores or on a Ray cluster. Each run is one process's work and is seeded
by its own scenario, so where it ran changes nothing."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from windtunnel.sim.cluster import run
from windtunnel.sim.output import write_run
from windtunnel.sim.scenario import Scenario, ScenarioError

MAX_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Point:
    """The values that this run changes, and the scenario with them in it."""

    values: dict[str, Any]
    scenario: Scenario


def run_points(points: Sequence[Point], on: str, jobs: int | None, out: Path | None) -> list[dict[str, Any]]:
    """`{"point": …, "summary": …}` of each, in order. With `out` each run has a folder `run-NNNN` there."""
    folders = [None if out is None else out / f"run-{number:04}" for number in range(len(points))]
    if on == "ray":
        return _on_ray(points, folders)
    if on != "processes":
        raise ScenarioError(f"--on is {on!r}: must be processes or ray")
    workers = min(len(points), jobs or os.cpu_count() or 1)
    if workers == 1:
        return [_run_point(point, folder) for point, folder in zip(points, folders, strict=True)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run_point, points, folders))


def _run_point(point: Point, folder: Path | None) -> dict[str, Any]:
    result = run(point.scenario, keep_rows=folder is not None)
    if folder is not None:
        write_run(result, point.scenario, folder)
    return {"point": point.values, "summary": result.summary}


def _on_ray(points: Sequence[Point], folders: Sequence[Path | None]) -> list[dict[str, Any]]:
    """On the cluster that RAY_ADDRESS names, or on a local one that ends with the sweep."""
    try:
        import ray
    except ImportError:
        raise ScenarioError("--on ray needs the package ray (pip install windtunnel[ray])") from None
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=1)(_run_point)
        rows: list[dict[str, Any]] = ray.get([remote.remote(*pair) for pair in zip(points, folders, strict=True)])
        return rows
    finally:
        ray.shutdown()
