"""Profiles: their file form, their noise, and the front end that takes turns."""

import json
import random
import statistics
from dataclasses import replace

import pytest

from windtunnel.core.frontend import Frontend
from windtunnel.core.machine import Machine, OtherJobs
from windtunnel.core.pacing import StepPlan
from windtunnel.core.profile import (
    FrontendCosts,
    Noise,
    NoiseStream,
    Profile,
    ProfileError,
    ProfilePacing,
    StepCosts,
    at_speed,
    from_mapping,
)

PROFILE = Profile(
    StepCosts(1000.0, 5.0, 100.0, 0.5, 0.25, 0.5),
    FrontendCosts(600.0, 1.0, 50.0, 10.0, 200.0, 300.0, 3),
    Noise((0.0, 0.5, 1.0), (-10.0, 0.0, 400.0), 0.4, 0.9),
    Noise((0.0, 1.0), (-5.0, 5.0)),
    "test",
    Machine(4, 2.5),
)


def test_a_profile_survives_its_file() -> None:
    assert from_mapping(json.loads(json.dumps(PROFILE.as_mapping()))) == PROFILE


def test_a_profile_that_does_not_know_its_machine_is_one() -> None:
    document = PROFILE.as_mapping()
    del document["machine"]
    assert from_mapping(document) == replace(PROFILE, machine=Machine()) and not Machine().cores


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("step", {"base_ns": -1}, "step.base_ns is -1: must be a number of 0 to"),
        ("step", {"base_ns": 1e300}, r"step.base_ns is 1e\+300: must be a number of 0 to 1e\+18 \(10\^9 s\)"),
        ("step", {"base_ns": 10**400}, "step.base_ns is 1000+: must be a number of 0 to"),
        ("step", {"noise_growth": 1e7}, "step.noise_growth is 10000000.0: must be a number of 0 to 1000"),
        ("frontend", {"prompt_token_ns": 2e18}, r"frontend.prompt_token_ns is 2e\+18: must be a number of 0 to"),
        (
            "step_noise",
            {"values_ns": [0, 1, 1e19]},
            r"step_noise.values_ns\[2\] is 1e\+19: must be a number of -1e\+18 to 1e\+18",
        ),
        ("step_noise", {"shares": [0, 0.5, float("nan")]}, r"step_noise.shares\[2\] is nan: must be a number of 0 to 1"),
        ("step_noise", {"shares": [0] * 10_001}, "step_noise.shares: must be a list of at most 10000 numbers"),
        ("step", {"bass_ns": 1}, "step.bass_ns: unknown field; known are base_ns"),
        ("frontend", {"turns": 0}, "frontend.turns is 0: must be a number of 1 to 1000"),
        ("frontend", {"turns": 1.5}, "frontend.turns is 1.5: must be a whole number"),
        ("machine", {"cores": 1.5}, "machine.cores is 1.5: must be a whole number"),
        ("machine", {"engine_cores": 0.5}, "machine.engine_cores is 0.5: must be a number of 1 to"),
        ("step_noise", {"values_ns": [0, "x", 1]}, r"step_noise.values_ns\[1\] is 'x': must be a number"),
        ("step_noise", {"values_ns": [0, -1, 1]}, "noise.values_ns: must not fall"),
        ("step_noise", {"shares": [0, 0.5]}, "noise: shares and values_ns must be of one length"),
        ("step_noise", {"values_ns": "01"}, "step_noise.values_ns: must be a list"),
        ("step_noise", {"memory": 1}, "noise: lasting must be 0 to 1 and memory"),
    ],
)
def test_a_wrong_profile_names_its_field(section: str, change: dict[str, object], message: str) -> None:
    document = PROFILE.as_mapping()
    document[section] = {**document[section], **change}
    with pytest.raises(ProfileError, match=message):
        from_mapping(document)


def test_other_files_are_refused() -> None:
    with pytest.raises(ProfileError, match="format: must be 'windtunnel-profile-1'"):
        from_mapping({"step": {}})
    without = PROFILE.as_mapping()
    del without["step"]["base_ns"]
    for document in (without, {key: value for key, value in without.items() if key != "step"}):
        with pytest.raises(ProfileError, match=r"step\.base_ns: is missing"):
            from_mapping(document)
    with pytest.raises(ProfileError, match="pace: unknown field"):
        from_mapping({**PROFILE.as_mapping(), "pace": 1})


@pytest.mark.parametrize("lasting", [0.0, 0.6])
def test_noise_keeps_its_distribution_whatever_lasts(lasting: float) -> None:
    stream = NoiseStream(Noise((0.0, 0.5, 0.99, 1.0), (-100.0, 0.0, 100.0, 5000.0), lasting, 0.9), random.Random(3))
    sample = sorted(stream.draw() for _ in range(40_000))
    assert sample[20_000] == pytest.approx(0, abs=3)
    assert sample[39_600] == pytest.approx(100, abs=60)
    assert sample[-1] > 3000


def test_what_lasts_shows_in_the_next_draws() -> None:
    def correlation(lasting: float) -> float:
        stream = NoiseStream(Noise((0.0, 1.0), (-1.0, 1.0), lasting, 0.95), random.Random(4))
        sample = [stream.draw() for _ in range(20_000)]
        return statistics.correlation(sample[:-1], sample[1:])

    assert abs(correlation(0.0)) < 0.03
    assert correlation(0.6) == pytest.approx(0.55, abs=0.05)


def test_step_time_is_the_sum_of_its_costs() -> None:
    quiet = Profile(PROFILE.step, PROFILE.frontend)
    assert ProfilePacing(quiet, random.Random(0)).step_ns(StepPlan(10, 3, 200, 40)) == 1000 + 50 + 300 + 100 + 10
    assert ProfilePacing(at_speed(quiet, 10.0), random.Random(0)).step_ns(StepPlan(10, 3, 200, 40)) == 146


def test_one_seed_gives_one_series() -> None:
    def steps() -> list[int]:
        pacing = ProfilePacing(PROFILE, random.Random(9))
        return [pacing.step_ns(StepPlan(0, 4, 100)) for _ in range(50)]

    assert steps() == steps()
    assert len(set(steps())) > 40


# Other jobs of the machine


def test_other_jobs_slow_whoever_wants_more_cores_than_they_leave() -> None:
    two = Machine(cores=2, engine_cores=1.5)
    assert [two.engine_stretch(jobs) for jobs in (0.0, 0.5, 0.8, 1.0, 7.0)] == [1.0, 1.0, 1.25, 1.5, 1.5]
    assert [two.shared_stretch(jobs) for jobs in (0.0, 0.4, 1.0)] == [1.0, 1.25, 2.0]
    eight = Machine(cores=8, engine_cores=1.5)
    assert [eight.engine_stretch(jobs) for jobs in (5.0, 6.5, 6.8, 7.0)] == [1.0, 1.0, pytest.approx(1.25), 1.5]
    assert [eight.shared_stretch(jobs) for jobs in (5.0, 6.0, 7.0)] == [1.0, 1.25, 2.5]


def test_a_machine_that_is_not_known_is_never_short_of_cores() -> None:
    assert Machine().engine_stretch(5.0) == Machine().shared_stretch(5.0) == Machine(cores=1).shared_stretch(1.0) == 1.0


def test_what_other_jobs_take_changes_at_its_times() -> None:
    jobs = OtherJobs((0.1, 0.9, 0.4), (100, 200))
    assert [jobs.at(at_ns) for at_ns in (0, 99, 100, 199, 200, 10**9)] == [0.1, 0.1, 0.9, 0.9, 0.4, 0.4]
    assert OtherJobs().at(5) == 0.0


def test_other_jobs_slow_what_a_step_costs_whatever_its_prompts() -> None:
    pacing = ProfilePacing(Profile(PROFILE.step, PROFILE.frontend), random.Random(0))
    pacing.stretch = 1.5
    assert pacing.step_ns(StepPlan(10, 3, 200, 40)) == 1.5 * (1000 + 300) + 50 + 100 + 10


# The front end


def frontend(**costs: float) -> Frontend:
    return Frontend(FrontendCosts(**costs), Noise(), random.Random(0))  # type: ignore[arg-type]


def test_an_idle_loop_gives_a_request_its_own_work_only() -> None:
    loop = frontend(request_ns=600.0, prompt_token_ns=1.0, turns=3, handover_ns=50.0)
    loop.arrive("a", 30, 1000)
    times, work_ns = [], 0.0
    while (at := loop.next_event_at()) is not None:
        times.append(at)
        turn = loop.turn()
        assert not turn.chunks
        work_ns += turn.request_work_ns
    assert times == [1000, 1210, 1420]
    assert turn.submissions == [("a", 1000 + 630 + 50)]
    assert work_ns == 630 + 50


def test_a_busy_loop_makes_a_request_wait_a_burst_for_each_turn() -> None:
    loop = frontend(request_ns=30.0, turns=3, step_ns=100.0, chunk_ns=10.0)
    for step in range(4):
        loop.take_outputs([("x", False), ("y", False)], step * 100)
    loop.arrive("a", 1, 0)
    submitted = []
    while not submitted:
        assert loop.next_event_at() is not None
        submitted = loop.turn().submissions
    assert submitted[0].at_ns == 2 * (10 + 120) + 10


def test_tokens_that_pile_up_leave_as_one_chunk() -> None:
    loop = frontend(step_ns=100.0, chunk_ns=10.0)
    for at in (0, 10, 20):
        loop.take_outputs([("a", at == 20), ("b", False)], at)
    assert loop.turn().chunks == [("a", 1, 110, False), ("b", 1, 120, False)]
    assert loop.turn().chunks == [("a", 2, 230, True), ("b", 2, 230 + 40, False)]
    assert loop.next_event_at() is None
