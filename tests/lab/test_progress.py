"""What a person reads, on a terminal and where the output is a file."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.lab.fake_server import FakeServer
from tests.lab.test_findings import PLAN

from windtunnel.core.units import S
from windtunnel.lab.finding import Finding, Severity
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Moment, Role, Shape, Trigger
from windtunnel.lab.progress import Lines, _cells, _console, _table, storm_picture
from windtunnel.lab.record import LostClient
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target
from windtunnel.lab.view import StormEvent, StormView


def trial(**changes: Any) -> dict[str, Any]:
    base = {
        "trial": 1,
        "error": None,
        "bystanders": {"sent": 40, "harmed": 23, "by_status": {"200": 17, "400": 6, "500": 9, "none": 8}},
        "later_streams": {"sent": 20, "complete": 3},
        "leaked": {"running": 4.0, "waiting": 11.0, "kv_usage": 0.123456},
        "race_reports": 987654,
    }
    return {**base, **changes}


def test_no_number_of_a_table_is_cut_in_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _console(stderr=False).print(_table({"arms": {"control": {"trials": [trial()]}, "treatment": {"trials": []}}}))
    out = capsys.readouterr().out
    assert "…" not in out
    for number in ("23 of 40", "none×8", "3 of 20", "kv_usage +0.123456", "987654"):
        assert number in out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"leaked": {"running": None, "kv_usage": None}}, "not observable"),
        ({"leaked": {"running": 0.0, "kv_usage": None}}, "nothing"),
        ({"error": "it died"}, "unknown"),
    ],
)
def test_nothing_is_said_to_have_leaked_only_where_it_was_seen(changes: dict[str, Any], expected: str) -> None:
    assert _cells(trial(**changes))[3] == expected


def view(**changes: Any) -> StormView:
    finding = Finding("slot_leak", Severity.HIGH, "a slot stays", ("running is 3 (baseline 0, +3)",), 1)
    base = StormView(
        at_ns=2_500_000_000,
        phase="storm",
        planned=90,
        opened=40,
        open_by_stage={"sent": 5, "tokens": 12},
        ended={"left": 7, "finished": 3},
        bystanders=4,
        harmed=1,
        gauges={"running": (15.0, 2.0), "waiting": (0.0, 0.0), "odd": (1.0, None)},
        findings=(finding,),
        lost_clients=(LostClient("client process 2", "was killed by signal 9 (SIGKILL)", 0, 6),),
    )
    return replace(base, **changes)


def drawn(one: StormView) -> str:
    out = StringIO()
    Console(file=out, force_terminal=True, width=120, color_system=None).print(storm_picture(one))
    return out.getvalue()


def test_the_picture_shows_phase_streams_gauges_and_findings() -> None:
    text = drawn(view())
    for part in (
        "2.5 s  victims are leaving   40 of 90 requests opened",
        "waiting for headers 5  streaming 12",
        "left 7  finished 3",
        "4 asked, 1 harmed",
        "running 15 (+13)  waiting 0 (+0)  odd 1",
        "slot_leak (high) ×1: running is 3",
        "client process 2 was killed by signal 9 (SIGKILL): 6 requests lost",
    ):
        assert part in text
    assert "none known" in drawn(view(gauges={}, findings=(), lost_clients=()))


def test_lines_tell_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(_console())
    lines.event(StormEvent(1_000_000_000, "later", ""))
    lines.view(view())
    lines.view(view())
    assert capsys.readouterr().err.splitlines() == [
        "    1.00 s  counting later streams",
        "    2.50 s  client process 2 was killed by signal 9 (SIGKILL): 6 requests lost",
        "    2.50 s  slot_leak (high): running is 3 (baseline 0, +3)",
    ]


async def test_a_storm_tells_how_it_stands() -> None:
    """Victims leave when a view has shown them, and it becomes quiet when one has shown the finding."""
    seen: list[StormView] = []
    server = FakeServer(frozenset({"bystander-500"}))
    port = await server.start()

    def watch(one: StormView) -> None:
        seen.append(one)
        shown = one.open_by_stage.get("tokens", 0) >= PLAN.victims and one.gauges.get("running", (0, 0))[0] > 0
        server.waiting = int((server.waiting or shown) and not one.findings)

    patient = replace(PLAN, state_patience_ns=60 * S, quiet_deadline_ns=60 * S)
    plan = replace(patient, victim=Shape(max_tokens=100_000), when=Trigger(Moment.QUEUED, 0))
    try:
        result = await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), plan, on_view=watch)
    finally:
        await server.stop()
    assert {one.left_in for one in result.of(Role.VICTIM)} == {"queued (inferred)"}
    assert result.quiet_ns is not None
    assert any(finding.name == "bystander_error" for finding in seen[-1].findings)
    assert seen[-1].opened <= seen[-1].planned + 1
    assert {one.name for one in seen[-1].findings} <= {one.name for one in find(result)}
