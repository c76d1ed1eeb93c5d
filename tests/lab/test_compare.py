"""Comparison of results, power, sequential looks and runs of an arm against itself."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import EXPERIMENT, server_command

from windtunnel.lab.compare import compare, holm
from windtunnel.lab.experiment import Options, run_experiment
from windtunnel.lab.experiment_file import Experiment, parse
from windtunnel.lab.power import least_significant, least_trials, power_from_nothing, requests_needed
from windtunnel.lab.verdict import decide


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return asyncio.run(run_experiment(parse(EXPERIMENT.format(server=server_command()), "fake.toml"), Options()))


def test_equal_results_do_not_differ(document: dict[str, Any]) -> None:
    result = compare(document, document)
    assert not result["worse"]
    assert {row["change"] for row in result["metrics"]} == {"none"}
    assert result["findings"][0]["both"] == ["bystander_error"]


def test_what_got_worse_is_named(document: dict[str, Any]) -> None:
    after = copy.deepcopy(document)
    for trial in after["arms"]["treatment"]["trials"]:
        trial["bystanders"]["harmed"] = 12
    after["findings"].append({"name": "wedged", "arm": "treatment", "trial": 1})
    result = compare(document, after)
    assert result["worse"]
    assert [row["metric"] for row in result["metrics"] if row["change"] == "worse"] == ["bystanders.harmed"]
    assert result["findings"][1]["new"] == ["wedged"]
    assert [row["change"] for row in compare(after, document)["metrics"]].count("better") == 1


def test_two_kinds_of_results_are_not_compared(document: dict[str, Any]) -> None:
    one_storm = {"target": "http://127.0.0.1:1", **document}
    with pytest.raises(ValueError, match="compare two of a kind"):
        compare(document, one_storm)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_power_by_hand() -> None:
    assert least_significant(40, 0.05) == 6
    assert power_from_nothing(40, 1.0, 0.05) == 1.0
    needed = requests_needed(0.5, 0.8, 0.05)
    assert needed is not None and power_from_nothing(needed, 0.5, 0.05) >= 0.8
    assert least_trials(0.05) == 4


async def test_an_arm_against_itself(experiment: Experiment) -> None:
    result = await run_experiment(experiment, Options(aa="treatment"))
    assert result["verdict"] == "confirmed"
    assert "equal arms do not differ" in result["why"]
    assert [one["arm"] for one in result["predictions"]] == ["control", "treatment"]
    assert "--aa treatment" in result["reproduce"]


async def test_a_look_at_an_obvious_effect_ends_the_run(text: str) -> None:
    experiment = parse(text.replace("trials = 2", "trials = 5"), "fake.toml")
    result = await run_experiment(experiment, Options(looks=5))
    assert len(result["arms"]["control"]["trials"]) == 4
    assert result["effect"]["p_value"] < result["effect"]["level"] < 0.05
    assert result["verdict"] == "confirmed"


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [
        ({"margin": 0.1, "ci95": [-0.05, 0.09]}, "confirmed"),
        ({"margin": 0.1, "ci95": [-0.05, 0.11]}, "inconclusive"),
        ({"margin": 0.1, "ci95": None}, "inconclusive"),
        ({"aa": True, "ci95": None, "p_value": 0.01}, "refuted"),
        ({"level": 0.01, "p_value": 0.02}, "inconclusive"),
        ({"level": 0.01, "p_value": 0.009}, "confirmed"),
        ({"aa": True, "level": 0.01, "ci95": None, "p_value": 0.02}, "confirmed"),
    ],
)
def test_other_claims_than_a_difference(effect: dict[str, Any], verdict: str) -> None:
    assert decide([True], {"p_value": 0.5, "alpha": 0.05, **effect}, complete=True)[0] == verdict


def test_the_command_line_compares(document: dict[str, Any], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from windtunnel.cli.main import app

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["same_storm"] is True
