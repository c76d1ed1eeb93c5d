"""A fit finds what made the data: synthetic runs of a known profile, and predictions of a run that was left out."""

import random
from dataclasses import replace

import numpy as np
import pytest

from windtunnel.core.machine import Machine
from windtunnel.core.profile import FrontendCosts, Noise, Profile, StepCosts
from windtunnel.sim.calibrate.cpu import beside_other_jobs
from windtunnel.sim.calibrate.fit import fit
from windtunnel.sim.calibrate.lone import FitError, lones, unseen
from windtunnel.sim.calibrate.measured import Measured, Run
from windtunnel.sim.calibrate.prediction import markdown, predict, summary
from windtunnel.sim.calibrate.replay import EngineLimits, replay

LIMITS = EngineLimits(max_num_seqs=16, max_num_batched_tokens=2048, block_size=16)
TRUTH = Profile(
    StepCosts(5e6, 20_000.0, 200_000.0, 100.0, 10.0),
    FrontendCosts(2e6, 0.0, 200_000.0, 50_000.0, 300_000.0, 500_000.0, 0.3, 6),
    Noise((0.0, 0.5, 0.99, 1.0), (-200_000.0, 0.0, 400_000.0, 3e6)),
)


def load(concurrency: int, count: int) -> Run:
    """What a client would ask for; the times are still empty."""
    chance = random.Random(concurrency)
    sizes = [(chance.choice((16, 128, 512, 1024)), chance.choice((8, 16, 32))) for _ in range(count)]
    asked = [Measured(at * 1e-3, prompt, output, ((1.0, 1),), 1.0) for at, (prompt, output) in enumerate(sizes)]
    return Run(f"c={concurrency}", concurrency, asked)


def measured(concurrency: int, count: int) -> Run:
    run = replay(load(concurrency, count), TRUTH, LIMITS, seed=concurrency)
    heads = [replace(one, headers_ms=2.0) for one in run.requests]
    return Run(run.name, run.concurrency, heads)


def test_a_lone_client_shows_the_costs_of_a_step_and_of_prefill() -> None:
    (alone,) = lones([[measured(1, 60)]])
    assert alone.step_ms == pytest.approx(5.2, rel=0.02)
    assert alone.context_token_ms == pytest.approx(1e-4, rel=0.3)
    assert alone.prefill_token_ms == pytest.approx(0.02, rel=0.1)
    assert alone.first_ms == pytest.approx(2 + 0.5 + 0.3 + 0.2 + 0.05, rel=0.1)
    assert alone.chunk_ms == pytest.approx(0.05, rel=0.01)
    assert float(np.max(alone.step_noise_ms)) > 1.0


def test_groups_share_the_costs_of_work_and_keep_their_own_surroundings() -> None:
    """Of two passes only the second shows what prefill costs, and every step of it is a millisecond longer."""
    quiet = replay(Run("a", 1, [replace(one, prompt_tokens=16) for one in load(1, 40).requests], "a"), TRUTH, LIMITS, seed=1)
    slower = replace(TRUTH, step=replace(TRUTH.step, base_ns=6e6))
    busy = replay(replace(load(1, 60), group="b"), slower, LIMITS, seed=2)
    first, second = lones([[quiet], [busy]])
    assert first.prefill_token_ms == second.prefill_token_ms == pytest.approx(0.02, rel=0.15)
    assert (first.step_ms, second.step_ms) == (pytest.approx(5.2, rel=0.02), pytest.approx(6.2, rel=0.02))
    found = fit([quiet, busy], LIMITS)
    assert found.of(busy).step.base_ns - found.of(quiet).step.base_ns == pytest.approx(1e6, rel=0.1)
    assert found.of(replace(busy, group="c")) is found.profile
    assert unseen([quiet, busy], [quiet]) and not unseen([quiet, busy], [quiet, busy])


def beside_jobs(run: Run, seed: int) -> Run:
    """The run on two cores of which other jobs take one in every other two seconds."""
    jobs = {"": tuple((2.0 * at, float(at % 2)) for at in range(1, 20))}
    profile = replace(TRUTH, machine=Machine(cores=2, engine_cores=1.6))
    return beside_other_jobs([replay(beside_other_jobs([run], jobs)[0], profile, LIMITS, seed=seed)], jobs)[0]


def test_a_lone_client_shows_how_other_jobs_slow_a_step() -> None:
    run = beside_jobs(load(1, 60), 1)
    (alone,) = lones([[run]], cores=2)
    assert alone.machine.cores == 2 and alone.machine.engine_cores == pytest.approx(1.6, abs=0.05)
    assert alone.step_ms == pytest.approx(5.2, rel=0.02)
    assert alone.first_ms == pytest.approx(2 + 0.5 + 0.3 + 0.2 + 0.05, rel=0.1)
    (blind,) = lones([[replace(run, other_jobs=())]], cores=2)
    assert blind.machine == Machine(cores=2) and blind.step_ms > 5.2 * 1.04


def test_a_run_is_predicted_beside_its_own_other_jobs() -> None:
    quiet, busy = measured(1, 60), beside_jobs(load(3, 30), 2)
    found = fit([beside_jobs(load(1, 60), 1)], LIMITS, cores=2).of(quiet)
    rows = predict([busy], [], lambda _run: found, LIMITS, (7,))
    assert all(row.hit for row in rows if row.percentile == 50), markdown(rows)
    blind = predict([replace(busy, other_jobs=())], [], lambda _run: found, LIMITS, (7,))
    assert not any(row.hit for row in blind if row.percentile == 50 and row.quantity != "ttft"), markdown(blind)


def test_other_jobs_that_no_lone_client_met_are_a_doubt() -> None:
    quiet, busy = measured(1, 60), beside_jobs(load(3, 30), 2)
    (doubt,) = unseen([quiet, busy], [quiet])
    assert doubt == "what other jobs do to a step is a guess: a lone client hardly met any, up to 1 cores are given"
    assert unseen([quiet, busy], [quiet, beside_jobs(load(1, 60), 1)]) == []


@pytest.mark.slow
def test_a_fit_recovers_the_truth_and_predicts_what_was_left_out() -> None:
    runs = [measured(1, 60), measured(4, 80), measured(12, 120)]
    found = fit(runs[:2], LIMITS, seed=5, rounds=6)
    profile = found.profile
    assert found.distance is not None and found.distance < 0.1
    assert profile.step.decode_seq_ns == pytest.approx(200_000, rel=0.4)
    assert profile.step.base_ns + profile.step.decode_seq_ns == pytest.approx(5.2e6, rel=0.02)
    rows = predict(runs, runs[:2], found.of, LIMITS, (7, 8))
    left_out = [row for row in rows if not row.fitted]
    assert {row.run for row in left_out} == {"c=12"}
    assert all(row.hit for row in left_out if row.percentile == 50), markdown(left_out)


def test_one_seed_gives_one_replay() -> None:
    one, same, other = (replay(load(4, 20), TRUTH, LIMITS, seed=seed).requests for seed in (3, 3, 4))
    assert one == same != other


def test_a_replay_serves_every_request_once_and_respects_the_concurrency() -> None:
    run = replay(load(4, 30), TRUTH, LIMITS, seed=1)
    assert sorted((one.prompt_tokens, one.output_tokens) for one in run.requests) == sorted(
        (one.prompt_tokens, one.output_tokens) for one in load(4, 30).requests
    )
    assert all(one.chunks[-1][1] == one.output_tokens for one in run.requests)
    edges = sorted(
        [(one.sent_s, 1) for one in run.requests] + [(one.end_s, -1) for one in run.requests],
        key=lambda edge: (edge[0], edge[1]),
    )
    assert max(np.cumsum([change for _at, change in edges])) <= 4


def test_cached_prompts_are_faster_and_an_open_loop_keeps_its_times() -> None:
    cold = [Measured(0.1 * at, 1024, 4, ((1.0, 1),), 1.0) for at in range(6)]
    warm = [replace(one, cached_tokens=1008) for one in cold]
    slow, fast = (replay(Run("open", None, requests), TRUTH, LIMITS, seed=1).requests for requests in (cold, warm))
    assert all(a.ttft_ms > b.ttft_ms + 15 for a, b in zip(slow, fast, strict=True))
    assert [round(one.sent_s - slow[0].sent_s, 6) for one in slow] == [round(0.1 * at, 6) for at in range(6)]


def test_what_cannot_be_fitted_is_said() -> None:
    with pytest.raises(FitError, match="no run with concurrency 1"):
        fit([load(8, 4)], LIMITS)
    with pytest.raises(FitError, match="no inter-token time to fit"):
        fit([load(1, 4)], LIMITS)


def test_a_table_marks_its_misses() -> None:
    run = measured(1, 20)
    slower = replace(TRUTH, step=replace(TRUTH.step, base_ns=9e6))
    table = markdown(predict([run], [run], lambda _run: slower, LIMITS, (1,)))
    assert "| c=1 (fitted) |" in table and "**" in table


def test_a_miss_that_the_measurement_is_no_surer_than_is_told_from_others() -> None:
    run = measured(1, 12)
    rows = predict([run], [], lambda _run: TRUTH, LIMITS, (1,))
    assert all(row.measured_low_ms <= row.measured_ms <= row.measured_high_ms for row in rows)
    assert all(row.measured_low_ms < row.measured_high_ms for row in rows)
    tail = next(row for row in rows if (row.quantity, row.percentile) == ("e2e", 99))
    off = replace(tail, measured_low_ms=0.7 * tail.measured_ms, predicted_ms=0.75 * tail.measured_ms)
    assert off.within_sampling_error and not off.hit and "** °" in markdown([off])
    assert not replace(off, predicted_ms=0.6 * tail.measured_ms).within_sampling_error


def test_a_run_that_changed_half_way_is_beyond_any_profile() -> None:
    requests = [Measured(1.0 * at, 16, 3, ((5.0, 1), (10.0, 2), (15.0, 3)), 15.1) for at in range(20)]
    slower = [replace(one, chunks=((5.0, 1), (12.0, 2), (19.0, 3))) for one in requests[10:]]
    rows = predict([Run("c=1", 1, requests[:10] + slower)], [], lambda _run: TRUTH, LIMITS, (1,))
    gap, first = (next(row for row in rows if (row.quantity, row.percentile) == (name, 50)) for name in ("itl", "ttft"))
    assert [real for real, _ours in gap.halves] == [5.0, 7.0] and gap.measured_ms == 6.0
    assert not gap.alike and not gap.steady and gap.within_reach == 0.0
    assert first.alike and first.steady and first.within_reach == 1.0
    assert gap.resampled_share < first.resampled_share == 1.0
    off = replace(gap, predicted_ms=4.0, measured_high_ms=9.0, measured_low_ms=5.0)
    assert markdown([off]).endswith("** ≠ |")
    assert summary([off, first])[0].startswith("Left out: ")


def test_what_halves_asked_for_is_no_change() -> None:
    """Twice the output tokens take twice as long, and the prediction knows that."""
    run = measured(1, 20)
    short, long = ([replace(one, output_tokens=count) for one in run.requests] for count in (8, 16))
    asked = [replace(one, sent_s=0.1 * at) for at, one in enumerate([*short, *long])]
    rows = predict([replay(Run("c=1", 1, asked), TRUTH, LIMITS, seed=3)], [], lambda _run: TRUTH, LIMITS, (1, 2))
    whole = next(row for row in rows if (row.quantity, row.percentile) == ("e2e", 50))
    assert not whole.alike and whole.steady
