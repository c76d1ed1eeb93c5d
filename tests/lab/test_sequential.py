"""Stopping early does not inflate the error: many experiments in which nothing differs, with looks at the effect in between."""

from random import Random
from typing import Any

import pytest
from tests.lab.conftest import EXPERIMENT

from windtunnel.lab.experiment import Options, _significant_already
from windtunnel.lab.experiment_file import ArmName, Experiment, parse
from windtunnel.lab.verdict import decide, effect_document

RUNS, TRIALS, LOOKS, ALPHA = 300, 10, 5, 0.05
PER_TRIAL = 30


def null_trial(random: Random) -> dict[str, Any]:
    """One trial in which every second request is harmed, in either arm."""
    harmed = sum(random.random() < 0.5 for _ in range(PER_TRIAL))
    return {"error": None, "interrupted": None, "bystanders": {"harmed": harmed, "sent": PER_TRIAL}}


def called_different(experiment: Experiment, seed: int) -> bool:
    """Whether one run with nothing to find, looked at five times, says that the arms differ."""
    random = Random(seed)
    trials: dict[ArmName, list[dict[str, Any]]] = {"control": [], "treatment": []}
    for _ in range(TRIALS):
        for arm in trials.values():
            arm.append(null_trial(random))
        if _significant_already(experiment, Options(looks=LOOKS), trials):
            break
    effect = effect_document(experiment.effect, trials["control"], trials["treatment"]) | {"looks": LOOKS}
    return decide([True], effect, complete=True)[0] == "confirmed"


@pytest.fixture(scope="module")
def fake() -> Experiment:
    return parse(EXPERIMENT.format(server="true"), "fake.toml").model_copy(update={"trials": TRIALS})


@pytest.mark.slow
def test_five_looks_keep_the_error_below_alpha(fake: Experiment) -> None:
    wrong = sum(called_different(fake, seed) for seed in range(RUNS)) / RUNS
    assert wrong <= ALPHA


@pytest.mark.slow
def test_five_looks_at_full_alpha_would_not(fake: Experiment) -> None:
    """The test above can fail: whoever looks five times at 5 % errs more often."""
    wrong = sum(_naive(fake, seed) for seed in range(RUNS)) / RUNS
    assert wrong > ALPHA


def _naive(experiment: Experiment, seed: int) -> bool:
    random = Random(seed)
    trials: dict[str, list[dict[str, Any]]] = {"control": [], "treatment": []}
    for number in range(1, TRIALS + 1):
        for arm in trials.values():
            arm.append(null_trial(random))
        effect = effect_document(experiment.effect, trials["control"], trials["treatment"])
        if number % (TRIALS // LOOKS) == 0 and effect["p_value"] < ALPHA:
            return True
    return False
