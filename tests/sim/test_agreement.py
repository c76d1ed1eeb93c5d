"""The same scenario on a live server and in `sim`: equal counts, and medians that agree (measured by `bench/agreement.py`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from bench import agreement
from bench.agreement import arguments, lived, scenario, simulated
from tests.own_time import own_time
from tests.serve.live import serving

from windtunnel.serve.flags import parse_args
from windtunnel.sim.scenario import Scenario

STEADY_REQUESTS = 80
"""Seven seconds of them; the bench sends for twenty."""


@contextlib.asynccontextmanager
async def in_this_loop(wanted: Scenario) -> AsyncIterator[int]:
    async with serving(parse_args(arguments(wanted, 0)).config) as server:
        yield server.port


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcomes"), [("steady", {"finished", "aborted"}), ("burst", {"finished", "aborted", "refused"})]
)
async def test_counts_are_equal_and_medians_agree(name: str, outcomes: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts must be equal. Live medians hold the machine's own delays, so they may not lie far below a model's that has none.

    How close they come on a quiet machine is a benchmark's matter, not a test's. Clients and server are in one loop and keep
    its time: in a burst a pause of the machine would be time in which the server finishes somebody and refuses fewer.
    """
    monkeypatch.setitem(agreement.WORKLOADS["steady"], "requests", STEADY_REQUESTS)
    monkeypatch.setattr(agreement, "server", in_this_loop)
    with own_time(asyncio.get_running_loop()) as own:
        monkeypatch.setattr(agreement, "time", SimpleNamespace(perf_counter=own.time, perf_counter_ns=own.now_ns))
        live, frontend = await lived(scenario(name))
    undelayed, model = simulated(scenario(name)).medians(), simulated(scenario(name, frontend))
    assert live.outcomes == model.outcomes
    assert set(model.outcomes) == outcomes
    assert all(live.medians()[each] > 0.9 * median for each, median in undelayed.items())
