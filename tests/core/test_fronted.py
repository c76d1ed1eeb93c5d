"""An engine behind its front end: what waits where, what leaves together, and what an abort or a removal does to it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.rig import engine, request

from windtunnel.core.engine import Engine
from windtunnel.core.fronted import FrontedEngine
from windtunnel.core.lifecycle import State
from windtunnel.core.machine import NO_OTHER_JOBS, Machine, OtherJobs
from windtunnel.core.outputs import FinishReason, StepOutput
from windtunnel.core.profile import FrontendCosts, Profile, ProfilePacing, StepCosts, at_speed
from windtunnel.core.request import UNTIL_RELEASED
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine

STEP_NS = 1_000
NEVER_NS = 10**15
_LIMIT = 10_000


def profile(**costs: Any) -> Profile:
    return Profile(StepCosts(base_ns=STEP_NS), FrontendCosts(**costs))


def vllm(pacing: ProfilePacing, **config: Any) -> Engine:
    return engine(pacing, **config)


def sglang(pacing: ProfilePacing) -> Engine:
    return SglangEngine(SglangEngineConfig(max_total_num_tokens=4096), pacing, random.Random(0))


def fronted(
    make: Any = vllm, *, limits: dict[str, Any] | None = None, other_jobs: OtherJobs = NO_OTHER_JOBS, **costs: Any
) -> tuple[Any, FrontedEngine]:
    draws = random.Random(0)
    pacing = ProfilePacing(replace(profile(**costs), machine=Machine(2, 1.5)), draws, other_jobs)
    made = make(pacing, **(limits or {}))
    return made, FrontedEngine(made, pacing, draws)


def play(front: FrontedEngine, until_ns: int = NEVER_NS) -> list[StepOutput]:
    """Everything up to a time."""
    done: list[StepOutput] = []
    for _ in range(_LIMIT):
        at_ns = front.next_event_at()
        if at_ns is None or at_ns > until_ns:
            return done
        done += front.advance(at_ns)
    raise AssertionError("the machine does not come to rest")


def heard(steps: Sequence[StepOutput], name: str) -> list[tuple[int, int]]:
    """(time, tokens) of each output of one sequence."""
    return [(step.at_ns, len(out.token_ids)) for step in steps for out in step.outputs if out.request_id == name]


@pytest.mark.parametrize("make", [vllm, sglang])
def test_a_request_runs_when_the_front_end_has_done_its_work(make: Any) -> None:
    made, front = fronted(make, request_ns=700.0, turns=2, handover_ns=50.0, wake_ns=30.0, chunk_ns=10.0)
    front.submit([request("a", 8, 3, arrival_ns=100)], 100)
    play(front, 100 + 700 + 50 + 30 - 1)
    assert [view.state for view in made.live()] == [State.DEFERRED]
    ready_ns = 100 + 700 + 50 + 30
    assert heard(play(front), "a") == [(ready_ns + STEP_NS * step + 10, 1) for step in (1, 2, 3)]
    assert not made.live()
    made.check_integrity()


def test_only_a_sleeping_engine_must_be_woken() -> None:
    _made, front = fronted(wake_ns=10_000.0, request_ns=100.0)
    front.submit([request("a", 8, 30)], 0)
    steps = play(front, 15_000)
    front.submit([request("b", 8, 2, arrival_ns=15_000)], 15_000)
    steps += play(front)
    assert heard(steps, "a")[0] == (10_100 + STEP_NS, 1)
    assert heard(steps, "b")[0] == (10_100 + 6 * STEP_NS, 1)


def test_what_piles_up_leaves_as_one_output_and_the_steps_show_no_outputs() -> None:
    _made, front = fronted(chunk_ns=2_500.0)
    front.submit([request("a", 8, 8)], 0)
    steps = play(front)
    tokens = [count for _at, count in heard(steps, "a")]
    assert sum(tokens) == 8 and max(tokens) > 1
    assert [step for step in steps if step.stats is not None and step.outputs] == []
    last = [out for step in steps for out in step.outputs][-1]
    assert last.finish_reason is FinishReason.LENGTH


def test_choices_of_one_prompt_cost_the_front_end_one_request() -> None:
    made, front = fronted(request_ns=500.0)
    pair = [request(name, 8, 2, parent_id="p") for name in ("a", "b")]
    front.submit(pair, 0)
    steps = play(front)
    assert heard(steps, "a")[0][0] == heard(steps, "b")[0][0] == 500 + STEP_NS
    assert not made.live()


def test_a_refusal_is_known_at_once_and_leaves_nothing_behind() -> None:
    made, front = fronted(limits={"max_num_queued_reqs": 1}, request_ns=500.0)
    assert front.submit([request("a", 8, 2)], 0) is None
    refusal = front.submit([request("b", 8, 2)], 0)
    assert refusal is not None and refusal.reason == "max_num_queued_reqs"
    assert not heard(play(front), "b")
    assert not made.live()


@pytest.mark.parametrize("make", [vllm, sglang])
@pytest.mark.parametrize("at_ns", [100, 700, 1_800, 3_100])
def test_an_aborted_request_leaves_nothing_behind(make: Any, at_ns: int) -> None:
    """SGLang's engine ends a running one with its next batch, so an output of it may come yet."""
    made, front = fronted(make, request_ns=600.0, chunk_ns=400.0)
    front.submit([request("a", 8, 50), request("b", 8, 6)], 0)
    play(front, at_ns)
    assert front.abort(["a"], at_ns) == 1
    rest = play(front)
    assert heard(rest, "b") and len(heard(rest, "a")) <= (0 if make is vllm else 2)
    assert not made.live() and not front._held and not front._at_work and not front._incoming
    made.check_integrity()


def test_the_work_on_a_request_delays_the_step_beside_it() -> None:
    for contention, last_ns in ((0.0, 21_100), (0.5, 21_100 + 50)):
        _made, front = fronted(request_ns=100.0, contention=contention)
        front.submit([request("a", 8, 21)], 0)
        steps = play(front, 5_500)
        front.submit([request("b", 8, 1, arrival_ns=5_500)], 5_500)
        steps += play(front)
        assert heard(steps, "a")[-1][0] == last_ns


def test_other_jobs_slow_the_engine_alone_and_both_more_while_both_work() -> None:
    # of two cores one is left: a lone step takes 1.5 times as long; beside the front end both take twice as long
    _made, front = fronted(other_jobs=OtherJobs((1.0,)), request_ns=100.0, handover_ns=50.0)
    front.submit([request("a", 8, 21)], 0)
    steps = play(front, 5_500)
    assert [at_ns for at_ns, _tokens in heard(steps, "a")] == [150 + 1_500 * step for step in (1, 2, 3)]
    front.submit([request("b", 8, 1, arrival_ns=5_500)], 5_500)
    steps += play(front)
    lost_ns = (2.0 - 1.5) * 150
    assert heard(steps, "b")[0][0] == 150 + 1_500 * 5 + lost_ns
    assert heard(steps, "a")[-1][0] == 150 + 1_500 * 21 + lost_ns


def test_the_front_end_works_half_as_fast_beside_an_engine_on_its_only_core() -> None:
    _made, front = fronted(other_jobs=OtherJobs((0.0, 1.0), (3_000,)), chunk_ns=100.0)
    front.submit([request("a", 8, 4)], 0)
    written = [at_ns for at_ns, _tokens in heard(play(front), "a")]
    third_ns = 3_000 + 1_500 + 50  # its step has begun with the jobs and lost (2 - 1.5) x 100 to the chunk before
    assert written == [1_100, 2_100, 3_000 + 200, third_ns + 100]


def test_other_jobs_change_nothing_where_they_are_none() -> None:
    costs = {"request_ns": 700.0, "chunk_ns": 300.0, "contention": 0.5, "turns": 3}
    heard_of = []
    for jobs in (NO_OTHER_JOBS, OtherJobs((0.0, 0.0), (2_000,))):
        _made, front = fronted(other_jobs=jobs, **costs)
        front.submit([request(name, 8, 9) for name in ("a", "b")], 0)
        heard_of.append(play(front))
    assert heard_of[0] == heard_of[1]


def test_a_front_end_that_goes_releases_all_and_gives_what_it_held() -> None:
    made, front = fronted(request_ns=400.0, chunk_ns=3_000.0)
    front.submit([request("a", 8, 20)], 0)
    written = sum(count for _at, count in heard(play(front, 5_000), "a"))
    front.submit([request("b", 8, 2, arrival_ns=5_000)], 5_000)
    (left,) = front.let_go(5_000)
    assert left.request_id == "a" and len(left.token_ids) > 0
    outputs = [out for _ in range(100) for step in made.advance(NEVER_NS) for out in step.outputs]
    assert written + len(left.token_ids) + sum(out.request_id == "a" for out in outputs) == 20
    assert sum(out.request_id == "b" for out in outputs) == 2


def test_held_requests_queue_in_the_order_of_their_release_and_only_once() -> None:
    made = engine(ProfilePacing(profile(), random.Random(0)), max_num_seqs=1)
    made.submit([request(name, 8, 1, deferred_until_ns=UNTIL_RELEASED) for name in ("a", "b", "c")], 0)
    assert made.advance(10) and made.next_event_at() is None
    for names in (["c", "unknown"], ["a"], ["c"]):
        made.release(names, 10)
    outputs = [out.request_id for _ in range(20) for step in made.advance(NEVER_NS) for out in step.outputs]
    assert outputs == ["c", "a"]
    assert [view.state for view in made.live()] == [State.DEFERRED]
    assert made.abort(["b"], NEVER_NS) == 1
    made.check_integrity()


def test_speed_divides_every_duration_of_a_profile() -> None:
    slow = Profile(StepCosts(base_ns=1000.0, noise_growth=0.5), FrontendCosts(request_ns=500.0, contention=0.5, turns=3))
    fast = at_speed(slow, 10.0)
    assert fast.step == StepCosts(base_ns=100.0, noise_growth=0.5)
    assert fast.frontend == FrontendCosts(request_ns=50.0, contention=0.5, turns=3)
