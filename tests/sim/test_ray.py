"""A sweep on a Ray cluster of two nodes gives what it gives in processes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

FLAGS = ["--engines", "2", "--rate", "20", "--duration", "5s", "--output-tokens", "20", "--json"]
SWEEP = ["--sweep", "policy=round-robin,least-load", "--sweep", "workload.rate=5,30"]


def _sweep(on: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "windtunnel", "sim", *FLAGS, *SWEEP, "--on", on]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_two_nodes_give_what_processes_give() -> None:
    pytest.importorskip("ray", reason="the extra windtunnel[ray] is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        on_ray = _sweep("ray", RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert on_ray == _sweep("processes")
    assert len(on_ray["sweep"]) == 4
