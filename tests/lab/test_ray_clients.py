"""A storm on a Ray cluster of two nodes gives what one process gives; without Ray or a cluster the error says what to do."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.conftest import until
from tests.lab.fake_server import FakeServer
from tests.lab.test_clients import PLAN, essence, fake

from windtunnel.lab.findings import find
from windtunnel.lab.pipes import ClientsError
from windtunnel.lab.plan import Role, Shape
from windtunnel.lab.ray_pipe import ray_pipes
from windtunnel.lab.record import End
from windtunnel.lab.storm import run_storm

ON_RAY = replace(PLAN, clients=2, on="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    pytest.importorskip("ray", reason="the extra windtunnel[ray] is not installed")
    from ray.cluster_utils import Cluster

    two = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        two.add_node(num_cpus=1)
        yield two.address
    finally:
        two.shutdown()  # type: ignore[no-untyped-call]


async def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClientsError, match=r"pip install 'windtunnel\[ray\]'"):
        await ray_pipes(2)


@pytest.mark.parametrize("address", ["127.0.0.1:1", None])
@pytest.mark.slow
def test_without_a_cluster_the_error_says_how_to_start_one(tmp_path: Path, address: str | None) -> None:
    pytest.importorskip("ray", reason="the extra windtunnel[ray] is not installed")

    async def storm() -> subprocess.CompletedProcess[str]:
        server = FakeServer()
        port = await server.start()
        command = [sys.executable, "-m", "windtunnel", "storm", f"http://127.0.0.1:{port}", "--clients", "2", "--on", "ray"]
        environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
        environment |= {"RAY_ADDRESS": address} if address else {}
        try:
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env=environment, timeout=120
            )
        finally:
            await server.stop()

    done = asyncio.run(storm())
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers; set RAY_ADDRESS" in done.stderr


@pytest.mark.slow
async def test_two_nodes_give_what_one_process_gives(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    async with fake() as (_, target):
        one = await run_storm(target, PLAN)
    async with fake() as (_, target):
        two = await run_storm(target, ON_RAY)
    assert essence(two) == essence(one)
    assert all(0 < stream.started_ns <= stream.ended_ns for stream in two.streams)
    import ray

    assert not ray.is_initialized()


@pytest.mark.slow
async def test_more_clients_than_cpus_are_refused(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with pytest.raises(ClientsError, match="3 clients need a CPU each, the cluster has 2 free"):
        await ray_pipes(3)


def all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    return int((read(pid, "stat").rpartition(")")[2].split() or ["", "0"])[1])


def is_client(pid: int, parent: int, cluster: str) -> bool:
    """Whether it is a client's actor on a node of this cluster: its parent, the node's raylet, has the cluster's address."""
    return "ray::RayClient" in read(pid, "cmdline") and cluster in read(parent, "cmdline")


@pytest.mark.slow
async def test_the_clients_are_on_both_nodes_and_a_lost_one_is_reported(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    plan = replace(ON_RAY, victim=Shape(max_tokens=100_000), survivors=0)
    async with fake(silent_after=1) as (server, target):
        storm = asyncio.create_task(run_storm(target, plan))
        await until(lambda: server.running == plan.victims)
        raylets = {pid: parent for pid in all_processes() for parent in [parent_of(pid)] if is_client(pid, parent, cluster)}
        assert len(raylets) == len(set(raylets.values())) == 2
        os.kill(min(raylets), 9)
        server.goes_on.set()
        result = await storm
    (lost,) = result.lost_clients
    assert lost.requests == sum(stream.end is End.CLIENT_DIED for stream in result.streams) > 0
    assert all(stream.complete for stream in result.of(Role.LATER))
    assert find(result) == ()


@pytest.mark.slow
def test_the_command_line_spreads_over_the_cluster(cluster: str) -> None:
    async def storm() -> subprocess.CompletedProcess[str]:
        server = FakeServer()
        port = await server.start()
        command = [
            sys.executable,
            "-m",
            "windtunnel",
            "storm",
            f"http://127.0.0.1:{port}",
            "--clients",
            "2",
            "--on",
            "ray",
            "--json",
        ]
        try:
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": cluster}, timeout=120
            )
        finally:
            await server.stop()

    done = asyncio.run(storm())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clients"] == {"processes": 2, "on": "ray", "lost": []}
