"""Two results, of experiments arm by arm or of single storms: what got better, what got worse, and what is only noise.

Rates are compared by Fisher's exact test on effective counts, means by a permutation test over trials; the p-values of one
comparison are corrected together (Holm 1979), so that many metrics do not make a false alarm likely. A finding that is new in
the second result counts as worse whatever the statistics say. A single storm is one trial, so its numbers are set side by side
and never called different.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.lab.experiment import ARMS, valid
from windtunnel.lab.report import is_storm
from windtunnel.lab.stats import Comparison, compare_clustered, compare_means
from windtunnel.lab.verdict import counts_of, metric

ALPHA = 0.05
STORM = "storm"
"""In place of an arm's name."""
RATES: tuple[tuple[str, str], ...] = (
    ("bystanders.harmed", "bystanders.sent"),
    ("survivors.lost", "survivors.sent"),
    ("later_streams.lost", "later_streams.sent"),
    ("retries.lost", "retries.sent"),
)
MEANS: tuple[str, ...] = (
    "leaked.running", "leaked.waiting", "leaked.kv_usage", "zombie_tokens", "freed_after_s", "quiet_s", "race_reports",
    "survivors.itl_ms", "later_streams.ttft_ms",
)  # fmt: skip
"""Of all of these more is worse."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison as a document; `worse` says whether anything got worse. Raises ValueError for results of two kinds."""
    if is_storm(before) != is_storm(after):
        raise ValueError("one is a storm's result and the other an experiment's: compare two of a kind")
    arms = (STORM,) if is_storm(before) else ARMS
    rows = [row for arm in arms for row in _rows(arm, _trials(before, arm), _trials(after, arm))]
    for row, corrected in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_corrected"] = corrected
        row["change"] = "none" if corrected >= ALPHA else "worse" if row["after"] > row["before"] else "better"
    findings = [_finding_changes(before, after, arm) for arm in arms]
    return {
        "before": _head(before),
        "after": _head(after),
        "alpha": ALPHA,
        "metrics": rows,
        "findings": findings,
        "same_storm": before["storm"] == after["storm"],
        "worse": any(row["change"] == "worse" for row in rows) or any(one["new"] for one in findings),
    }


def _head(document: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("target", "model", "started_at", "versions") if is_storm(document) else _HEAD
    return {key: document[key] for key in keys}


_HEAD = ("experiment", "verdict", "seed", "trials", "started_at", "versions")


def _trials(document: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    return valid([{**document, "error": None}] if arm == STORM else document["arms"][arm]["trials"])


def _rows(arm: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for hits, total in RATES:
        one, two = counts_of(before, hits, total), counts_of(after, hits, total)
        if one and two:
            out.append(_row(arm, hits, compare_clustered(one, two)))
    for name in MEANS:
        first, second = _values(before, name), _values(after, name)
        if first and second:
            out.append(_row(arm, name, compare_means(first, second)))
    return out


def _values(trials: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for trial in trials if (value := metric(trial, name)) is not None]


def _row(arm: str, name: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "arm": arm,
        "metric": name,
        "before": comparison.control,
        "after": comparison.treatment,
        "difference": -comparison.difference,
        "ci95": [-edge for edge in reversed(comparison.ci95)] if comparison.ci95 else None,
        "p_value": comparison.p_value,
        "test": comparison.test,
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the chance of any false alarm among them all is at most alpha."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    out, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        out[index] = highest
    return out


def _finding_changes(before: Mapping[str, Any], after: Mapping[str, Any], arm: str) -> dict[str, Any]:
    one, two = (
        {finding["name"] for finding in document["findings"] if finding.get("arm", STORM) == arm}
        for document in (before, after)
    )
    return {"arm": arm, "new": sorted(two - one), "gone": sorted(one - two), "both": sorted(one & two)}
