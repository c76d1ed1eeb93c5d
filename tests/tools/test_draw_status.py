"""The status machine in docs/pd.md is the one in the code."""

from pathlib import Path

import draw_status

DOCUMENT = Path(__file__).parents[2] / "docs" / "pd.md"


def test_the_document_shows_the_machine_of_the_code() -> None:
    assert draw_status.drawing() in DOCUMENT.read_text("utf-8")


def test_only_the_sticky_rule_keeps_failed() -> None:
    leaving = {
        rule: [after for before, after, _ in draw_status.transitions(rule) if before == "Failed"] for rule in draw_status.DRAWN
    }
    assert leaving == {"nores": ["Bootstrapping", "WaitingForInput", "Transferring", "Success"], "terminal-failed": []}
