"""The same scenario on a live server and in `sim`: equal counts, and medians that agree (measured by `bench/agreement.py`)."""

import pytest
from bench.agreement import compare, scenario, simulated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcomes"), [("steady", {"finished", "aborted"}), ("burst", {"finished", "aborted", "refused"})]
)
def test_counts_are_equal_and_medians_agree(name: str, outcomes: set[str]) -> None:
    """Counts must be equal. Live medians hold the machine's own delays, so they may not lie far below a model's that has none.

    How close they come on a quiet machine is a benchmark's matter, not a test's.
    """
    result, undelayed = compare(name), simulated(scenario(name)).medians()
    assert result["counts"]["live"] == result["counts"]["sim"]
    assert set(result["counts"]["sim"]) == outcomes
    assert all(result["medians"]["live"][each] > 0.9 * median for each, median in undelayed.items())
