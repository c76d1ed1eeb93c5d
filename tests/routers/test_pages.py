"""The real routers before our workers: every mode and setup does what its committed page says (`make compat` writes it)."""

import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.compat import page, peers
from tests.compat.all import CLIENTS, FROM_SOURCE, ROUTERS
from tests.compat.cases import CASES
from tests.compat.modes import NOT_HERE, Mode, Peer, Setup
from tests.compat.run import CASE_S, SETUPS, bounded, columns, rows, run_alone, run_mode
from tests.compat.shapes import CHAT, OF
from tests.compat.site import ANSWER_S, site, worker

QUICK = tuple(case for case in CASES if not case.thorough)
MODES = [(peer, mode) for peer in ROUTERS for mode in peer.modes if not mode.not_run]
SETUP_ROWS = [(peer, setup) for peer in ROUTERS for setup in peer.setups if not setup.thorough and not setup.mode.not_run]
MUST_WORK = ("`/v1/chat/completions`", "`/v1/chat/completions`, streamed", "`/v1/completions`", "stop string", "300 tokens")
MUST_FREE = ("the client leaves a stream", "the client leaves before its whole answer")


@pytest.mark.parametrize(("peer", "mode"), MODES, ids=[f"{peer.name}: {mode.name}" for peer, mode in MODES])
async def test_a_mode_is_as_its_page_says(peer: Peer, mode: Mode) -> None:
    found = await run_mode(mode, peers.program(peer.program), QUICK)
    told = page.cells(peer)
    wrong = {
        row: (cell, told.get((row, name)))
        for (row, name), cell in found.items()
        if cell not in (told.get((row, name)), NOT_HERE)
    }
    assert not wrong, f"found, and what docs/compat/{peer.name}.md says: {wrong}"


@pytest.mark.parametrize(("peer", "setup"), SETUP_ROWS, ids=[f"{peer.name}: {setup.row}" for peer, setup in SETUP_ROWS])
async def test_a_setup_is_as_its_page_says(peer: Peer, setup: Setup) -> None:
    assert await run_alone(setup.mode, peers.program(peer.program), setup.probe) == page.cells(peer)[setup.row, SETUPS]


@pytest.mark.parametrize("peer", ROUTERS, ids=[peer.name for peer in ROUTERS])
def test_what_must_work_does(peer: Peer) -> None:
    """Whatever a run once wrote: these cells may not become anything else."""
    told = page.cells(peer)
    for mode in peer.modes:
        for named, wanted in ((MUST_WORK, "works"), (MUST_FREE, "freed")):
            assert mode.not_run or {told[row, mode.name] for row in named} == {wanted}, mode.name


def test_events_steer_a_router() -> None:
    (vllm_router,) = (peer for peer in ROUTERS if peer.name == "vllm-router")
    (row,) = (setup.row for setup in vllm_router.setups if "kv_aware" in setup.row)
    assert page.cells(vllm_router)[row, SETUPS] == "works"


@pytest.mark.parametrize("peer", [*CLIENTS, *FROM_SOURCE], ids=lambda peer: peer.name)
def test_a_page_of_a_client_has_every_cell(peer: Peer) -> None:
    """Their programs are too large for the suite; what `make compat` wrote must be of this table, and must not have failed."""
    told = page.cells(peer)
    wanted = {(row, name) for row in rows(peer) for name in columns(peer)} | {(setup.row, SETUPS) for setup in peer.setups}
    assert set(told) == wanted
    assert not [
        cell for cell in told.values() if cell.startswith(("fails", "no end", "exit code", "no:")) and "404" not in cell
    ]


@pytest.mark.parametrize("peer", [peer for peer in (*CLIENTS, *FROM_SOURCE) if peer.trial], ids=lambda peer: peer.name)
def test_a_benchmark_measures_what_the_server_was_told(peer: Peer) -> None:
    told = page.cells(peer)
    measured = [row for row in rows(peer) if row.startswith(("ends", "median", "output tokens", "the server is empty"))]
    assert len(measured) == 5
    assert {told[row, name] for row in measured for name in columns(peer)} == {"works"}


@pytest.mark.parametrize("silence", [TimeoutError, httpx.ReadTimeout])
async def test_a_router_that_falls_silent_fills_its_cell(silence: Any) -> None:
    """And does not end the run."""

    async def probe(_site: Any) -> str:
        raise silence("nothing came")

    made: Any = SimpleNamespace(mode=Mode("slow", "vllm", "", patience=3))
    assert await bounded(probe, made) == f"no end in {3 * CASE_S} s"


async def test_the_room_of_a_leg_that_never_came_is_no_work() -> None:
    """It stays in SGLang's prefill for good, so a site that waited for its end would wait in vain."""
    mode = Mode("pair", "sglang", "", ("prefill", "decode"))
    async with worker(mode, "prefill", mode.serve_flags) as prefill, worker(mode, "decode", mode.serve_flags) as decode:
        rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 7}
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
            await client.post(f"{decode.url}{CHAT}", json=OF[CHAT].body | rooms)
        engine: Any = prefill.live.server.engine
        assert engine.outstanding()["rooms"] == engine.outstanding()["stray_rooms"] == 1
        assert prefill.empty()


async def test_a_router_that_ends_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="exit code 1 before it was up"):
        async with site(Mode("gone", "vllm", "-c 1/0"), sys.executable):
            pass
