"""The rules, on trials made by hand."""

from typing import Any

import pytest

from windtunnel.lab.experiment_file import Effect, Prediction
from windtunnel.lab.verdict import EXIT_CODES, decide, effect_document, holds, metric

EFFECT = {"p_value": 0.01, "alpha": 0.05}


def trial(harmed: int, sent: int = 40, **more: Any) -> dict[str, Any]:
    return {
        "bystanders": {"sent": sent, "harmed": harmed, "by_status": {"200": sent - harmed}},
        "leaked": {"running": 0.0, "kv_usage": None},
        "counters": {"request_success{stop}": 4.0, "failed.total": 10.0},
        "findings": [{"name": "x"}],
        "series": [
            {"t_s": at, "gauges": {"inflight": value}} for at, value in ((0, 1), (10, 11), (12.5, 11), (36, 0), (60, 1))
        ],
        "events": [{"t_s": 0.4, "what": "left"}, {"t_s": 0.2, "what": "left"}],
        **more,
    }


def prediction(**changes: Any) -> Prediction:
    base = {"id": "p", "text": "", "arm": "control", "metric": "bystanders.harmed", "operator": ">", "value": 0}
    return Prediction.model_validate({**base, **changes})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("bystanders.harmed", 6),
        ("bystanders.by_status.200", 34),
        ("bystanders.by_status.404", 0),
        ("leaked.running", 0),
        ("leaked.kv_usage", None),
        ("leaked.nothing", None),
        ("nothing", None),
        ("counters.request_success{stop}", 4),
        ("counters.failed.total", 10),
        ("findings.count", 1),
        ("series.inflight.max", 11),
        ("series.inflight.min", 0),
        ("series.inflight.last", 1),
        ("series.inflight.at(12s)", 11),
        ("series.inflight.at(24s)", 0),
        ("series.inflight.at(90s)", None),
        ("series.absent.max", None),
    ],
)
def test_metric_paths(path: str, value: float | None) -> None:
    assert metric(trial(6), path) == value


@pytest.mark.parametrize(
    ("changes", "harmed", "expected"),
    [
        ({}, [6, 7, 7], True),
        ({}, [6, 0, 7], False),
        ({"over": "any"}, [0, 0, 7], True),
        ({"over": "any"}, [0, 0, 0], False),
        ({"over": "total", "operator": ">=", "value": 20}, [6, 7, 7], True),
        ({"over": "mean", "operator": "<", "value": 6.5}, [6, 7, 7], False),
        ({"operator": "==", "value": "counters.failed.total"}, [10, 10, 10], True),
        ({"operator": "==", "value": "counters.failed.total"}, [10, 9, 10], False),
        ({"operator": "!=", "value": 6}, [6], False),
        ({"metric": "leaked.kv_usage"}, [1], None),
        ({}, [], None),
    ],
)
def test_predictions(changes: dict[str, Any], harmed: list[int], expected: bool | None) -> None:
    assert holds(prediction(**changes), [trial(one) for one in harmed]) is expected


@pytest.mark.parametrize(
    ("predictions", "effect", "complete", "verdict"),
    [
        ([True, True], EFFECT, True, "confirmed"),
        ([True, False], EFFECT, True, "mixed"),
        ([False, False], EFFECT, True, "refuted"),
        ([True, None], EFFECT, True, "inconclusive"),
        ([False, None], EFFECT, True, "inconclusive"),
        ([True, True], EFFECT, False, "inconclusive"),
        ([True, True], {"p_value": 0.05, "alpha": 0.05}, True, "inconclusive"),
        ([True, True], {"p_value": None, "alpha": 0.05}, True, "inconclusive"),
        ([True, False], {"p_value": 0.9, "alpha": 0.05}, True, "mixed"),
    ],
)
def test_verdicts(predictions: list[bool | None], effect: dict[str, Any], complete: bool, verdict: str) -> None:
    assert decide(predictions, effect, complete=complete)[0] == verdict


def test_a_trial_that_could_not_be_judged_stands_in_the_way_of_confirmed_only() -> None:
    assert decide([True], EFFECT, complete=True, errors=["it died"]) == (
        "inconclusive",
        "1 trial could not be judged (it died)",
    )
    assert decide([True, False], EFFECT, complete=True, errors=["it died"])[0] == "mixed"
    assert decide([False], EFFECT, complete=True, errors=["it died"])[0] == "refuted"


def test_exit_codes() -> None:
    assert EXIT_CODES == {"confirmed": 0, "refuted": 1, "mixed": 1, "inconclusive": 3}


def test_effect_of_counts_is_pooled() -> None:
    effect = Effect(metric="bystanders.harmed", of="bystanders.sent")
    document = effect_document(effect, [trial(6), trial(7), trial(7)], [trial(0)] * 3)
    assert document["control_counts"] == [20, 120]
    assert document["control"] == pytest.approx(20 / 120)
    assert document["treatment"] == 0
    assert document["p_value"] < 1e-5
    assert document["ci95"][0] > 0


def test_effect_of_means() -> None:
    document = effect_document(Effect(metric="bystanders.harmed"), [trial(6), trial(7), trial(8)], [trial(0)] * 3)
    assert (document["control"], document["treatment"], document["p_value"]) == (7, 0, 0.1)


def test_effect_without_trials_is_null() -> None:
    document = effect_document(Effect(metric="bystanders.harmed", of="bystanders.sent"), [], [trial(0)])
    assert document["p_value"] is None
    assert document["ci95"] is None
