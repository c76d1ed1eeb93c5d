"""What a person reads, where the output is a file."""

from typing import Any

import pytest

from windtunnel.lab.progress import _cells, _console, _table


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
