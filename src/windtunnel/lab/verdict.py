"""From trials to a verdict, mechanically.

* A prediction *holds* (true or false) when its arm has at least one valid trial and its metric is present in all of
  them; otherwise it is undecided (null).
* A trial is *valid* when it ran to its end. One with an `error` (its server ended by itself, or could not be used) is
  not: it decides no prediction and no effect, and while there is one the verdict is never `confirmed` but `inconclusive`.
* `inconclusive`: an arm has no valid trial, the run was interrupted, a prediction is undecided, or every prediction
  holds but the effect is not significant at `alpha` (or cannot be computed).
* `confirmed`: every prediction holds and the effect is significant. With a `margin` the claim is the opposite one, that there
  is no effect larger than the margin: then the whole 95 % interval of the difference must lie within it.
* `refuted`: no prediction holds.
* `mixed`: some hold, some do not.

Exit codes: confirmed 0; refuted and mixed 1; inconclusive 3 (usage and environment errors are 2, elsewhere).
"""

import operator
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from windtunnel.core.units import parse_duration_ns
from windtunnel.lab.experiment_file import Effect, Prediction
from windtunnel.lab.stats import Comparison, clopper_pearson, compare_clustered, compare_means

Verdict = Literal["confirmed", "refuted", "mixed", "inconclusive"]
Trial = Mapping[str, Any]
EXIT_CODES: Mapping[str, int] = {"confirmed": 0, "refuted": 1, "mixed": 1, "inconclusive": 3}
_OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_COUNTS = frozenset({"by_status", "by_end", "left_in", "text_faults", "log_matches"})
_SERIES = re.compile(r"series\.(.+)\.(max|min|last|at\((.+)\))$")


def metric(trial: Trial, path: str) -> float | None:
    """The number at a path of a trial's document, or None when there is none."""
    series = _SERIES.match(path)
    if series:
        return _from_series(trial, series[1], series[2], series[3])
    if path.startswith("findings."):
        name = path.removeprefix("findings.")
        return float(sum(name in ("count", finding["name"]) for finding in trial["findings"]))
    value = _walk(trial, path)
    return float(value) if isinstance(value, int | float) else None


def _walk(value: Any, path: str) -> Any:
    """Follow a dotted path; a key may itself contain dots. What a table of counts does not name was counted zero times."""
    if not path:
        return value
    if not isinstance(value, Mapping):
        return None
    for key in value:
        if path == key or path.startswith(f"{key}."):
            found = _walk(value[key], path[len(key) + 1 :])
            return 0 if found is None and key in _COUNTS else found
    return None


def _from_series(trial: Trial, gauge: str, fold: str, at: str | None) -> float | None:
    rows = [(row["t_s"], row["gauges"][gauge]) for row in trial["series"] if gauge in row["gauges"]]
    if not rows:
        return None
    if at is not None:
        left = [event["t_s"] for event in trial["events"] if event["what"] == "left"]
        due = max(left, default=0.0) + parse_duration_ns(at) / 1e9 / trial.get("time_scale", 1.0)
        return next((float(value) for t_s, value in rows if t_s >= due), None)
    values = [float(value) for _, value in rows]
    return {"max": max(values), "min": min(values), "last": values[-1]}[fold]


def holds(prediction: Prediction, trials: Sequence[Trial]) -> bool | None:
    """Whether a prediction holds over the valid trials of its arm; None: undecided."""
    pairs = [_pair(prediction, trial) for trial in trials]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return None
    compare = _OPERATORS[prediction.operator]
    if prediction.over in ("total", "mean"):
        fold = sum if prediction.over == "total" else fmean
        left = fold(have for have, _ in known)
        right = fold(want for _, want in known) if isinstance(prediction.value, str) else prediction.value
        return bool(compare(left, right))
    results = [bool(compare(have, want)) for have, want in known]
    return all(results) if prediction.over == "every" else any(results)


def observed(prediction: Prediction, trials: Sequence[Trial]) -> list[float | None]:
    """The predicted metric in each trial."""
    return [metric(trial, prediction.metric) for trial in trials]


def _pair(prediction: Prediction, trial: Trial) -> tuple[float, float] | None:
    have = metric(trial, prediction.metric)
    want = metric(trial, prediction.value) if isinstance(prediction.value, str) else prediction.value
    return None if have is None or want is None else (have, want)


def effect_document(
    effect: Effect, control: Sequence[Trial], treatment: Sequence[Trial], confidence: float = 0.95
) -> dict[str, Any]:
    """The comparison of the arms; members are null when it cannot be made. The difference is control - treatment.

    `confidence` is that of the difference's interval.
    """
    out: dict[str, Any] = {"metric": effect.metric, "of": effect.of, "alpha": effect.alpha, "margin": effect.margin}
    compare = _compare_counts if effect.of else _compare
    comparison, extra = compare(effect, control, treatment, confidence)
    if comparison is None:
        return {**out, "control": None, "treatment": None, "difference": None, "ci95": None, "p_value": None, "test": None}
    return {**out, **comparison._asdict(), "ci95": list(comparison.ci95) if comparison.ci95 else None, **extra}


def _compare_counts(
    effect: Effect, control: Sequence[Trial], treatment: Sequence[Trial], confidence: float
) -> tuple[Comparison | None, dict[str, Any]]:
    assert effect.of is not None
    one, two = (counts_of(trials, effect.metric, effect.of) for trials in (control, treatment))
    if not one or not two:
        return None, {}
    pooled = [
        (name, (sum(hits for hits, _ in arm), sum(all_ for _, all_ in arm)))
        for name, arm in zip(_ARMS, (one, two), strict=True)
    ]
    extra = {
        f"{name}_{key}": value
        for name, counts in pooled
        for key, value in (("counts", list(counts)), ("ci95", list(clopper_pearson(*counts))))
    }
    return compare_clustered(one, two, confidence), extra


_ARMS = ("control", "treatment")


def counts_of(trials: Sequence[Trial], hits: str, of: str) -> list[tuple[int, int]]:
    """(how many, of how many) of each trial that has any."""
    pairs = [(metric(trial, hits), metric(trial, of)) for trial in trials]
    return [(int(one), int(total)) for one, total in pairs if one is not None and total]


def _compare(
    effect: Effect, control: Sequence[Trial], treatment: Sequence[Trial], confidence: float
) -> tuple[Comparison | None, dict[str, Any]]:
    one, two = ([metric(trial, effect.metric) for trial in trials] for trials in (control, treatment))
    known_one, known_two = [v for v in one if v is not None], [v for v in two if v is not None]
    if not known_one or not known_two:
        return None, {}
    return compare_means(known_one, known_two, confidence), {}


def decide(
    predictions: Sequence[bool | None], effect: Mapping[str, Any], *, complete: bool, errors: Sequence[str] = ()
) -> tuple[Verdict, str]:
    """The verdict and, in a clause, why. `complete`: the run ended by itself and both arms have valid trials.

    `errors`: of the trials that could not be judged.
    """
    verdict, why = _decide(predictions, effect, complete=complete)
    if not errors:
        return verdict, why
    lost = f"{len(errors)} trial{'s' if len(errors) > 1 else ''} could not be judged ({errors[0]})"
    return ("inconclusive", lost) if verdict == "confirmed" else (verdict, f"{why}; {lost}")


def _decide(predictions: Sequence[bool | None], effect: Mapping[str, Any], *, complete: bool) -> tuple[Verdict, str]:
    if not complete:
        return "inconclusive", "the run did not complete in both arms"
    if any(one is None for one in predictions):
        return "inconclusive", "a prediction could not be evaluated"
    held = sum(bool(one) for one in predictions)
    if held == 0:
        return "refuted", f"none of {len(predictions)} predictions holds"
    if held < len(predictions):
        return "mixed", f"{held} of {len(predictions)} predictions hold"
    if effect["p_value"] is None:
        return "inconclusive", "the effect could not be computed"
    if effect.get("aa"):
        return _decide_aa(effect)
    if effect.get("margin") is not None:
        return _decide_equivalence(effect)
    if effect["p_value"] >= effect.get("level", effect["alpha"]):
        return "inconclusive", f"all predictions hold, but the effect is not significant (p = {effect['p_value']:.3g})"
    return "confirmed", f"all {len(predictions)} predictions hold and the arms differ (p = {effect['p_value']:.2g})"


def _decide_aa(effect: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Equal arms: a significant difference means that the experiment itself is biased (or bad luck, once in 1/alpha runs)."""
    if effect["p_value"] < effect.get("level", effect["alpha"]):
        return "refuted", f"equal arms differ (p = {effect['p_value']:.3g}): the experiment is biased, or this is the 1 in 20"
    return "confirmed", f"equal arms do not differ (p = {effect['p_value']:.2g})"


def _decide_equivalence(effect: Mapping[str, Any]) -> tuple[Verdict, str]:
    """All predictions hold: is the difference shown to be within the margin?"""
    if effect["ci95"] is None:
        return "inconclusive", "the interval of the difference could not be computed; run more trials"
    largest = max(abs(edge) for edge in effect["ci95"])
    if largest <= effect["margin"]:
        return "confirmed", f"all predictions hold, and there is no effect larger than {largest:.3g} at 95 %"
    return "inconclusive", f"all predictions hold, but an effect of up to {largest:.3g} cannot be ruled out at 95 %"
