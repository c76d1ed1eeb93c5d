"""`--profile` and `--gpu`: what the server makes of them, live too, and what it says about wrong ones."""

import json
import random
from pathlib import Path

import pytest
from tests.serve.live import FOREVER_NS, RawClient, live, request_bytes
from tests.serve.test_operations import call

from windtunnel.core.pacing import StepPlan
from windtunnel.core.physics import GPUS, MODELS, PhysicsPacing
from windtunnel.core.profile import FrontendCosts, Profile, ProfilePacing, StepCosts
from windtunnel.serve.config import UsageError
from windtunnel.serve.engines import make_pacing
from windtunnel.serve.flags import parse_args

SLOW_STEPS = Profile(StepCosts(base_ns=FOREVER_NS), source="slow steps")
SLOW_FRONTEND = Profile(frontend=FrontendCosts(request_ns=FOREVER_NS), source="slow front end")
BODY = {"model": "wt-model", "prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
PLAN = StepPlan(64, 4, 3000, 2080)


def test_a_profile_file_paces_the_server(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = Profile(StepCosts(1000.0, 2.0, 30.0), FrontendCosts(request_ns=500.0), source="a test")
    path.write_text(json.dumps(profile.as_mapping()), "utf-8")
    config = parse_args(["m", "--profile", str(path), "--time-scale", "2"]).config
    assert config.pacing.profile == profile
    pacing = make_pacing(config.pacing, random.Random(0))
    assert isinstance(pacing, ProfilePacing)
    assert pacing.step_ns(PLAN) == (1000 + 128 + 120) // 2


def test_gpu_flags_pace_the_server() -> None:
    parsed = parse_args(["m", "--gpu", "h100", "--gpu-model", "llama-3.1-70b", "--tensor-parallel-size", "4"])
    assert not parsed.warnings
    expected = PhysicsPacing(GPUS["h100"], MODELS["llama-3.1-70b"], 4)
    assert make_pacing(parsed.config.pacing, random.Random(0)).step_ns(PLAN) == expected.step_ns(PLAN)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "h1000"], "--gpu: 'h1000' is not one of a100-80gb, h100"),
        (["--gpu", "h100", "--gpu-model", "gpt"], "--gpu-model: 'gpt' is not one of llama-3.1-8b"),
        (
            ["--gpu", "h100", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size 3 does not divide the 32 heads of llama-3.1-8b",
        ),
        (["--profile", "/nowhere.json"], "--profile: /nowhere.json: No such file"),
    ],
)
def test_wrong_settings_are_named(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_args(["m", *args])


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    for content, message in (
        ("{", "Expecting"),
        ("[]", "format: must be"),
        ('{"format": "windtunnel-profile-1", "step": 3}', "step: must be"),
        ('{"format": "windtunnel-profile-1", "step": {"base_ns": 1e300}}', "step.base_ns is 1e"),
        ('{"format": "windtunnel-profile-1"}', "step.base_ns: is missing"),
        ("[" * 100_000, "is nested too deeply"),
    ):
        (tmp_path / "p.json").write_text(content, "utf-8")
        with pytest.raises(UsageError, match=f"p.json: {message}"):
            parse_args(["m", "--profile", str(tmp_path / "p.json")])


async def test_a_profile_can_be_set_and_taken_back_while_the_server_runs() -> None:
    async with live() as server:
        status, config = await call(server, "POST", "/admin/config", {"profile": SLOW_STEPS.as_mapping()})
        assert status == 200 and config["pacing"]["profile"] == "slow steps"
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY))
        await server.until(lambda: server.states() == ["prefill"])
        assert server.server.engine.next_event_at() is not None
        client.leave("rst")
        status, answer = await call(server, "POST", "/admin/config", {"profile": {"format": "?"}})
        assert status == 400 and "profile: format: must be" in json.dumps(answer)
        assert (await call(server, "POST", "/admin/config", {"profile": None}))[1]["pacing"]["profile"] is None


async def test_the_front_end_of_a_profile_holds_a_request_back() -> None:
    async with live(pacing__profile=SLOW_FRONTEND) as server:
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY))
        await server.until(lambda: server.states() == ["deferred"])
        client.leave("rst")
        await server.until(lambda: server.states() == [])
