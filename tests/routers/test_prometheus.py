"""A real Prometheus scrapes our workers, and what it stores is what its page says (`make compat` writes it)."""

from pathlib import Path

import pytest
from tests.compat import page, peers, prometheus
from tests.compat.modes import Mode
from tests.compat.run import run_trial
from tests.serve.golden import FOLDER, needs_golden

PEER = prometheus.PEER
QUICK = [mode for mode in PEER.modes if mode.name in ("vLLM", "SGLang")]
STYLE_ROW = list(prometheus.ROWS)[-1]


@pytest.mark.parametrize("mode", QUICK, ids=[mode.name for mode in QUICK])
async def test_a_worker_is_scraped_as_its_page_says(mode: Mode) -> None:
    found = await run_trial(prometheus.Scraping(), mode, peers.program("prometheus"))
    told = page.cells(PEER)
    assert found == {key: told[key] for key in found}


def test_everything_but_style_works() -> None:
    """Whatever a run once wrote."""
    told = page.cells(PEER)
    assert set(told) == {(row, mode.name) for row in prometheus.ROWS for mode in PEER.modes}
    assert {cell for (row, _), cell in told.items() if row != STYLE_ROW} == {"works"}


@needs_golden
async def test_of_style_it_says_the_same_of_a_real_server() -> None:
    promtool = Path(peers.program("prometheus")).with_name("promtool")
    code, lines = await prometheus.checked(promtool, (FOLDER / "metrics_after.txt").read_text())
    assert code == prometheus.STYLE_EXIT
    assert prometheus.style(lines) == page.cells(PEER)[STYLE_ROW, "vLLM"] != "nothing"
