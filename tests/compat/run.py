"""Runs a peer's tables, one mode after the other, and gives its cells."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.compat import peers
from tests.compat.cases import CASES, Case
from tests.compat.modes import NOT_HERE, Mode, Peer, Trial
from tests.compat.site import Probe, Site, site

CASE_S = 120
Tell = Callable[[str], None]
Cells = dict[tuple[str, str], str]
"""(row, column) → what was found."""
SETUPS = ""
"""The column of rows with routers of their own."""


@dataclass(frozen=True)
class Found:
    """A peer's cells and the version that they are of."""

    version: str
    cells: Cells


def columns(peer: Peer) -> list[str]:
    return [mode.name for mode in peer.modes]


def rows(peer: Peer) -> list[str]:
    if peer.trial is not None:
        return list(peer.trial.rows)
    return [case.row for case in CASES if any(case.where(mode) for mode in peer.modes)]


async def run_peer(peer: Peer, program: Path, tell: Tell) -> Found:
    cells: Cells = {}
    for mode in peer.modes:
        tell(f"{peer.name}: {mode.name}")
        cells |= await (run_mode(mode, str(program)) if peer.trial is None else run_trial(peer.trial, mode, str(program)))
    for setup in peer.setups:
        tell(f"{peer.name}: {setup.row}")
        cells[setup.row, SETUPS] = setup.mode.not_run or await run_alone(setup.mode, str(program), setup.probe)
    return Found(peers.version(peer.package, program), cells)


async def run_mode(mode: Mode, program: str, cases: Sequence[Case] = CASES) -> Cells:
    if mode.not_run:
        return {(case.row, mode.name): "not run" if case.where(mode) else NOT_HERE for case in cases}
    cells = {(case.row, mode.name): NOT_HERE for case in cases}
    with quiet():
        async with site(mode, program) as made:
            for case in cases:
                if case.where(mode):
                    cells[case.row, mode.name] = await _tried(case, made)
    return cells


async def run_trial(trial: Trial, mode: Mode, program: str) -> Cells:
    with quiet():
        return {(row, mode.name): cell for row, cell in (await trial.run(mode, program)).items()}


async def _tried(case: Case, made: Site) -> str:
    told = await bounded(case.probe, made)
    if not case.last:
        await made.settle()
    return told


async def run_alone(mode: Mode, program: str, probe: Probe) -> str:
    with quiet():
        async with site(mode, program) as made:
            return await bounded(probe, made)


async def bounded(probe: Probe, made: Site) -> str:
    """A probe that fails is a cell, too; its message says what did not hold."""
    patience_s = CASE_S * made.mode.patience
    try:
        async with asyncio.timeout(patience_s):
            return await probe(made)
    except (TimeoutError, httpx.TimeoutException):
        return f"no end in {patience_s} s"
    except AssertionError as error:
        return f"fails: {error}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Servers and clients say nothing meanwhile: refusals and lost clients are what is asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
