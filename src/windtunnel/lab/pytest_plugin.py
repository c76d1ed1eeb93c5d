"""Fixtures for tests of routers, gateways and SDKs.

    def test_my_router_lets_nobody_leak(windtunnel_server, storm):
        worker = windtunnel_server("--ttft", "20ms", "--itl", "5ms")
        router = start_my_router(worker.url)
        assert_clean(storm(router.url, metrics_urls=[f"{worker.url}/metrics"]))

The plugin comes with the package (entry point `pytest11`). It imports nothing of the lab before a fixture is used. The fixtures
are for plain test functions; a test with a running event loop awaits `windtunnel.lab.storm.run_storm` itself.
"""

import asyncio
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from windtunnel.lab.arms import Running
    from windtunnel.lab.record import StormResult


class StartServer(Protocol):
    def __call__(self, *flags: str, engine: str = "vllm") -> "Running":
        """A fresh simulated server with these flags of `windtunnel serve`, ready and on a free port, until the test ends."""


class BlowStorm(Protocol):
    def __call__(
        self,
        url: str,
        *,
        model: str | None = None,
        headers: dict[str, str] | None = None,
        metrics_urls: Sequence[str] = (),
        watch: Sequence[str] = (),
        **settings: Any,
    ) -> "StormResult":
        """One storm; `settings` are keys of an experiment file's `[storm]` table. Only against this machine.

        Raises TargetError when metrics or gauges that were asked for are not there.
        """


@pytest.fixture
def _windtunnel_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def windtunnel_server(_windtunnel_runner: asyncio.Runner) -> Iterator[StartServer]:
    """A function that starts simulated servers; all are stopped when the test ends."""
    from windtunnel.lab.arms import running
    from windtunnel.lab.experiment_file import Arm

    started: list[AbstractAsyncContextManager[Running]] = []
    with tempfile.TemporaryDirectory(prefix="windtunnel-") as logs:

        def start(*flags: str, engine: str = "vllm") -> "Running":
            command = "{python} -m windtunnel serve --engine " + engine + " --model windtunnel --port {port} "
            arm = Arm(command=command + " ".join(shlex.quote(flag.replace("{", "").replace("}", "")) for flag in flags))
            server = running(arm, Path(logs) / f"{len(started)}.log", time_scale=1.0, seed=0)
            ready: Running = _windtunnel_runner.run(server.__aenter__())
            started.append(server)
            return ready

        try:
            yield start
        finally:
            for server in reversed(started):
                _windtunnel_runner.run(server.__aexit__(None, None, None))


@pytest.fixture
def storm(_windtunnel_runner: asyncio.Runner) -> BlowStorm:
    """A function that blows one storm and returns its result."""
    from windtunnel.lab.experiment_file import storm_plan
    from windtunnel.lab.storm import run_storm
    from windtunnel.lab.target import check_hosts, find_model, make_target

    def blow(
        url: str,
        *,
        model: str | None = None,
        headers: dict[str, str] | None = None,
        metrics_urls: Sequence[str] = (),
        watch: Sequence[str] = (),
        **settings: Any,
    ) -> "StormResult":
        target = make_target(url, model or "MODEL", headers=headers, metrics_urls=metrics_urls, watch=watch)
        check_hosts(target, owned=False)
        plan = storm_plan(settings, seed=0)

        async def run() -> "StormResult":
            name = model or await find_model(url, headers or {})
            return await run_storm(replace(target, model=name), plan)

        return _windtunnel_runner.run(run())

    return blow


def assert_clean(result: "StormResult", *, allow: Collection[str] = ()) -> None:
    """Fails the test with every finding that is not allowed, and when the storm proves nothing (`StormResult.untried`)."""
    from windtunnel.lab.findings import find

    asked_for = result.plan.victims or result.interrupted or result.lost_clients
    if asked_for and result.untried is not None:
        pytest.fail(f"nothing follows from the storm: {result.untried}", pytrace=False)
    found = [one for one in find(result) if one.name not in allow]
    if found:
        lines = [
            f"{one.name} ({one.severity.value}; usual cause: {one.cause})\n  " + "\n  ".join(one.evidence) for one in found
        ]
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture(name="assert_clean")
def assert_clean_fixture() -> Callable[..., None]:
    """`assert_clean` itself, for tests that would rather not import it."""
    return assert_clean
