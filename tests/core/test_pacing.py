"""Paces: distributions keep their mean and their tails, deadlines do not drift, and one seed gives one run."""

import random
import statistics

import pytest
from tests.core.rig import Rig, expected, request

from windtunnel.core.pacing import Duration, RequestPacing, StepPacing, StepPlan

MS = 1_000_000


def draws(duration: Duration, count: int = 20_000) -> list[int]:
    generator = random.Random(11)
    return [duration.draw_ns(generator) for _ in range(count)]


@pytest.mark.parametrize("kind", ["normal", "lognormal", "uniform"])
def test_a_distribution_has_its_mean_and_deviation(kind: str) -> None:
    sample = draws(Duration(20 * MS, 4 * MS, kind))
    assert statistics.mean(sample) == pytest.approx(20 * MS, rel=0.01)
    assert statistics.stdev(sample) == pytest.approx(4 * MS, rel=0.03)
    assert min(sample) >= 0


def test_tails_are_kept() -> None:
    sample = draws(Duration(20 * MS, 20 * MS, "lognormal"))
    assert max(sample) > 150 * MS
    assert min(draws(Duration(5 * MS, 10 * MS, "normal"))) == 0


def test_constant_and_zero_draw_nothing() -> None:
    assert set(draws(Duration(7, 0, "normal"), 5)) == {7}
    assert set(draws(Duration(7, 3), 5)) == {7}
    assert set(draws(Duration(0, 5, "normal"), 5)) == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Duration(1, 1, "gamma"), "kind is 'gamma': must be one of constant, normal, lognormal, uniform"),
        (lambda: Duration(-1), "mean_ns is -1"),
        (lambda: RequestPacing(random.Random(), load_factor=0.5), "load_factor is 0.5: must be at least 1"),
        (lambda: RequestPacing(random.Random(), time_scale=-1), "time_scale is -1"),
    ],
)
def test_bad_paces_name_their_field(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


def test_first_token_counts_uncached_prompt_tokens_load_and_scale() -> None:
    pacing = RequestPacing(random.Random(), Duration(1000), Duration(100), prefill_token_ns=10, load_factor=3.0, time_scale=0.5)
    assert pacing.first_token_ns(50, 20) == (1000 + 300) // 2
    assert pacing.first_token_ns(50, 20, load=1.0) == (1000 + 300) * 3 // 2
    assert pacing.next_token_ns(load=0.5) == 100
    assert pacing.step_ns(StepPlan(10, 10, 10)) == 0


def test_the_step_model_is_linear() -> None:
    pacing = StepPacing(100, 2, 30)
    assert pacing.step_ns(StepPlan(7, 3, 999)) == 100 + 14 + 90
    assert pacing.first_token_ns(10, 0) == pacing.next_token_ns() == 0


def test_each_sequence_keeps_its_own_deadlines() -> None:
    rig = Rig(RequestPacing(random.Random(0), Duration(50 * MS), Duration(20 * MS)))
    rig.submit(request("a", 8, 5))
    rig.event()
    rig.now_ns = 7 * MS
    rig.submit(request("b", 8, 5))
    rig.run()
    times = {name: [step.at_ns for step in rig.steps for out in step.outputs if out.request_id == name] for name in "ab"}
    assert times["a"] == [50 * MS + 20 * MS * at for at in range(5)]
    assert times["b"] == [57 * MS + 20 * MS * at for at in range(5)]


def test_a_late_driver_does_not_make_the_rest_late() -> None:
    rig = Rig(RequestPacing(random.Random(0), Duration(50 * MS), Duration(20 * MS)))
    rig.submit(request("a", 8, 5))
    rig.event()
    rig.now_ns = 65 * MS
    rig.event()
    rig.run()
    at = [step.at_ns for step in rig.steps if step.outputs]
    assert at == [65 * MS, 70 * MS, 90 * MS, 110 * MS, 130 * MS]


def test_after_a_long_stall_every_missed_token_comes_and_the_schedule_stands() -> None:
    rig = Rig(RequestPacing(random.Random(0), Duration(50 * MS), Duration(20 * MS)))
    rig.submit(request("a", 8, 5))
    rig.event()
    rig.now_ns = 100 * MS
    rig.run()
    at = [step.at_ns for step in rig.steps if step.outputs]
    assert at == [100 * MS, 100 * MS, 100 * MS, 110 * MS, 130 * MS]


def test_zero_is_as_fast_as_possible_one_token_an_advance() -> None:
    rig = Rig(RequestPacing(random.Random(0)))
    rig.submit(request("a", 100, 30))
    for at in range(30):
        (step,) = rig.event()
        assert len(step.outputs) == 1, at
    assert rig.now_ns == 0
    assert rig.tokens["a"] == expected("a", 30)


def test_a_long_prompt_is_prefilled_in_chunks_before_its_first_token_is_due() -> None:
    rig = Rig(RequestPacing(random.Random(0), Duration(50 * MS)), max_num_batched_tokens=30)
    rig.submit(request("a", 100, 2))
    rig.run()
    assert list(rig.stats("prefill_tokens")) == [30, 30, 30, 9, 1, 0]
    assert [step.at_ns for step in rig.steps if step.outputs] == [50 * MS, 50 * MS]


def test_load_slows_a_full_engine_down() -> None:
    def finish_ns(others: int) -> int:
        rig = Rig(RequestPacing(random.Random(0), Duration(MS), Duration(MS), load_factor=3.0), max_num_seqs=5)
        rig.submit(*[request(f"other{at}", 4, 500) for at in range(others)], request("a", 4, 10))
        rig.run(lambda: "a" in rig.finish)
        return rig.now_ns

    assert finish_ns(0) == 10 * MS
    assert finish_ns(4) == 30 * MS


def test_one_seed_gives_one_run() -> None:
    def times(seed: int) -> list[int]:
        rig = Rig(
            RequestPacing(random.Random(seed), Duration(50 * MS, 9 * MS, "normal"), Duration(20 * MS, 5 * MS, "lognormal"))
        )
        rig.submit(*[request(name, 8, 20) for name in "abc"])
        rig.run()
        return [step.at_ns for step in rig.steps]

    assert times(1) == times(1)
    assert times(1) != times(2)
