"""The engine's contract with its drivers: admission, aborts, operators, gauges."""

import dataclasses
import random

import pytest
from tests.core.rig import STEP_NS, Rig, expected, request

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import AllBlocksCleared, BlockStored, FinishReason
from windtunnel.core.pacing import Duration, RequestPacing, StepPacing
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig


def test_an_empty_engine_is_idle() -> None:
    rig = Rig()
    assert rig.engine.next_event_at() is None
    assert rig.engine.advance(10**12) == []


def test_a_live_id_cannot_be_used_again_but_an_ended_one_can() -> None:
    rig = Rig()
    rig.submit(request("a", 4, 2))
    with pytest.raises(ValueError, match="'a' is already live"):
        rig.submit(request("a", 4, 2))
    with pytest.raises(ValueError, match="'b' is already live"):
        rig.submit(request("b"), request("b"))
    rig.run()
    rig.states.clear()
    rig.finish.clear()
    assert rig.submit(request("a", 4, 2)) is None
    rig.run()
    assert rig.tokens["a"] == expected("a", 2) * 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", [], 1), "prompt_token_ids has 0 tokens: must be 1 to 1024"),
        (request("a", 1025, 1), "prompt_token_ids has 1025 tokens"),
        (request("a", 4, 0), "max_tokens is 0: must be at least 1"),
    ],
)
def test_what_no_engine_could_run_is_an_error(bad, message: str) -> None:  # type: ignore[no-untyped-def]
    rig = Rig()
    with pytest.raises(ValueError, match=message):
        rig.submit(request("fine"), bad)
    assert rig.engine.live() == []


def test_the_request_limit_counts_running_and_waiting_and_admits_groups_as_one() -> None:
    rig = Rig(max_num_queued_reqs=4, max_num_seqs=1)
    assert rig.submit(request("a", 4, 50), request("b"), request("c")) is None
    rig.step()
    refusal = rig.submit(request("d"), request("e"))
    assert refusal is not None
    assert (refusal.reason, refusal.status) == ("max_num_queued_reqs", 503)
    assert rig.submit(request("f")) is None
    assert len(rig.engine.live()) == 4
    rig.run()
    assert {t.request_id for t in rig.log if t.event is Event.REFUSE} == {"d", "e"}
    assert set(rig.finish) == {"a", "b", "c", "f"}


def test_the_token_limit_counts_prompts_without_a_token() -> None:
    rig = Rig(max_num_queued_tokens=50)
    assert rig.submit(request("a", 49, 5)) is None
    assert rig.submit(request("b", 30, 5)) is None
    refusal = rig.submit(request("c", 1, 1))
    assert refusal is not None
    assert refusal.reason == "max_num_queued_tokens"
    rig.step()
    assert rig.submit(request("d", 1, 1)) is None, "prefill is over, so the door is open"
    rig.abort("a")
    rig.run()


def test_a_refusal_reports_no_gauges() -> None:
    rig = Rig()
    rig.engine.pause("wait", 0)
    refusal = rig.submit(request("a"))
    assert refusal is not None
    step = rig.step()
    assert step.stats is None
    assert [t.after for t in step.transitions] == [State.REFUSED]
    assert rig.engine.next_event_at() is None


PHASES = {"queued": "c", "prefill": "b", "decode": "a"}


def _three_phases(**config: object) -> Rig:
    """`a` decodes, `b` is in the middle of its prompt, `c` waits."""
    rig = Rig(max_num_seqs=2, max_num_batched_tokens=40, enable_prefix_caching=False, **config)
    rig.submit(request("a", 8, 50))
    rig.step()
    rig.submit(request("b", 100, 5), request("c", 8, 5))
    rig.step()
    assert [rig.state(name) for name in "abc"] == [State.DECODE, State.PREFILL, State.QUEUED]
    return rig


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_frees_at_once_and_one_step_publishes_it(phase: str) -> None:
    rig, victim = _three_phases(), PHASES[phase]
    assert rig.engine.next_event_at() == rig.now_ns + STEP_NS, "a step is under way"
    assert rig.abort(victim) == 1
    assert victim not in [view.request_id for view in rig.engine.live()]
    rig.engine.check_integrity()
    said = len(rig.tokens.get(victim, []))
    step = rig.step()
    assert step.stats is not None
    assert step.stats.running + step.stats.waiting == 2
    assert len(rig.tokens.get(victim, [])) == said
    assert rig.states[victim] is State.ABORTED
    rig.run()
    assert set(rig.finish) == {"a", "b", "c"} - {victim}, "an abort without notice is not reported"


def test_the_step_under_way_publishes_the_abort_of_the_last_request() -> None:
    rig = Rig()
    rig.submit(request("a", 8, 100))
    rig.step()
    rig.abort("a")
    step = rig.step()
    assert (step.at_ns, step.outputs) == (2 * STEP_NS, [])
    assert step.stats is not None
    assert (step.stats.running, step.stats.waiting, step.stats.kv_usage) == (0, 0, 0.0)
    assert rig.engine.next_event_at() is None


def test_without_a_step_under_way_an_empty_one_publishes_the_abort_at_once() -> None:
    rig = Rig(RequestPacing(random.Random(0), Duration(10 * STEP_NS)))
    rig.submit(request("a", 8, 100))
    rig.step()
    assert rig.engine.next_event_at() == 10 * STEP_NS
    rig.now_ns = 5 * STEP_NS
    rig.abort("a")
    assert rig.engine.next_event_at() == rig.now_ns
    step = rig.step()
    assert step.at_ns == rig.now_ns, "a step without work takes no time"
    assert step.stats is not None
    assert (step.stats.running, step.stats.kv_usage) == (0, 0.0)
    assert rig.engine.next_event_at() is None


def test_unknown_and_ended_ids_are_no_ops() -> None:
    rig = Rig()
    rig.submit(request("a", 4, 1))
    rig.run()
    assert rig.abort("a", "nobody") == 0
    assert rig.engine.next_event_at() is None


def test_an_abort_with_notice_is_reported() -> None:
    rig = Rig()
    rig.submit(request("a", 8, 100), request("b", 8, 100))
    rig.step()
    assert rig.abort("a", "b", "a", notify=True) == 2
    rig.step()
    assert rig.finish == {"a": FinishReason.ABORT, "b": FinishReason.ABORT}


def test_asynchronous_scheduling_aborts_one_step_later_and_says_nothing_meanwhile() -> None:
    rig = Rig(async_scheduling=True)
    rig.submit(request("a", 8, 100), request("b", 8, 100))
    rig.step()
    rig.engine.advance(rig.now_ns)
    assert rig.abort("a", notify=True) == 1
    assert rig.abort("a") == 0
    said = len(rig.tokens["a"])
    first, second = rig.step(), rig.step()
    assert first.stats is not None
    assert second.stats is not None
    assert (first.stats.running, second.stats.running) == (2, 1)
    assert len(rig.tokens["a"]) == said
    assert rig.finish == {"a": FinishReason.ABORT}
    rig.run()
    assert rig.tokens["b"] == expected("b", 100)


def test_asynchronous_aborts_of_everything_come_to_rest() -> None:
    rig = Rig(async_scheduling=True)
    rig.submit(request("a", 8, 100), request("b", 8, 100))
    rig.step()
    rig.abort("a", "b")
    rig.run()
    assert rig.engine.live() == []
    assert rig.steps[-1].stats is not None
    assert rig.steps[-1].stats.running == 0


def test_pause_by_abort_ends_all_and_refuses() -> None:
    rig = _three_phases()
    assert rig.engine.pause("abort", rig.now_ns) == 3
    refusal = rig.submit(request("d"))
    assert refusal is not None
    assert (refusal.reason, refusal.status) == ("paused", 503)
    rig.run()
    assert set(rig.finish.values()) == {FinishReason.ABORT}
    assert rig.engine.drained
    rig.engine.resume(rig.now_ns)
    assert rig.submit(request("e", 4, 1)) is None
    rig.run()
    assert rig.tokens["e"] == expected("e", 1)


def test_pause_by_wait_lets_all_end() -> None:
    rig = _three_phases()
    assert rig.engine.pause("wait", rig.now_ns) == 0
    assert rig.submit(request("d")) is not None
    assert not rig.engine.drained
    rig.run()
    assert rig.engine.drained
    assert set(rig.finish) == {"a", "b", "c"}


@pytest.mark.parametrize("own_pace", [True, False])
def test_pause_by_keep_freezes_accepts_and_goes_on(own_pace: bool) -> None:
    pacing = RequestPacing(random.Random(0), Duration(STEP_NS), Duration(STEP_NS)) if own_pace else None
    rig = Rig(pacing)
    rig.submit(request("a", 8, 20))
    rig.run(lambda: len(rig.tokens.get("a", [])) == 3)
    rig.engine.pause("keep", rig.now_ns)
    rig.run()
    said = len(rig.tokens["a"])
    assert said <= 4
    assert rig.submit(request("b", 8, 2)) is None
    rig.run()
    assert len(rig.tokens["a"]) == said
    rig.now_ns += 100 * STEP_NS
    rig.engine.resume(rig.now_ns)
    resumed_ns = rig.now_ns
    rig.run()
    assert rig.tokens == {"a": expected("a", 20), "b": expected("b", 2)}
    assert rig.now_ns >= resumed_ns + (19 - said) * STEP_NS, "the pause is not made up for by a burst"


def test_a_late_driver_costs_an_arrival_nothing_and_a_full_engine_does() -> None:
    pacing = RequestPacing(random.Random(0), Duration(10 * STEP_NS), Duration(STEP_NS))
    late = Rig(pacing, max_num_seqs=1).engine
    late.submit([request("a", 8, 1)], 0)
    late.submit([request("b", 8, 1)], STEP_NS)
    late.advance(3 * STEP_NS)
    assert late.next_event_at() == 10 * STEP_NS
    late.advance(14 * STEP_NS)
    assert [view.request_id for view in late.live()] == ["b"]
    late.advance(15 * STEP_NS)
    assert late.next_event_at() == 25 * STEP_NS, "b counts from its admission"


def test_sleep_and_wake() -> None:
    rig = _three_phases()
    assert rig.engine.sleep(1, rig.now_ns) == 3
    assert rig.engine.control.sleep_state == "weights_offloaded"
    rig.run()
    assert rig.submit(request("d")) is not None
    rig.engine.wake(rig.now_ns)
    assert rig.engine.control.sleep_state == "awake"
    assert rig.submit(request("e", 4, 1)) is None


def test_the_prefix_cache_resets_only_while_all_blocks_are_free() -> None:
    rig = Rig()
    prompt = list(range(40))
    rig.submit(request("a", prompt, 50))
    rig.step()
    assert not rig.engine.reset_prefix_cache(rig.now_ns)
    rig.run()
    assert rig.engine.reset_prefix_cache(rig.now_ns)
    assert rig.engine.next_event_at() is None, "the event waits for a step"
    assert rig.cached != rig.engine.cached_hashes
    rig.submit(request("b", prompt, 2))
    events = [type(event) for event in rig.step().kv_events]
    assert events == [AllBlocksCleared, BlockStored]
    assert rig.cached == rig.engine.cached_hashes


def test_a_reset_may_preempt_what_runs() -> None:
    rig = Rig()
    rig.submit(request("a", 40, 30), request("b", 40, 30))
    rig.step()
    rig.engine.advance(rig.now_ns)
    assert rig.engine.reset_prefix_cache(rig.now_ns, reset_running=True)
    assert rig.ids(State.PREEMPTED) == ["a", "b"]
    rig.run()
    assert rig.tokens == {"a": expected("a", 30), "b": expected("b", 30)}
    assert rig.cached == rig.engine.cached_hashes


def test_a_dead_engine_fails_all_and_takes_nothing() -> None:
    rig = _three_phases()
    rig.engine.advance(rig.now_ns)
    assert rig.engine.kill(rig.now_ns) == 3
    step = rig.step()
    assert step.stats is None
    assert {output.error.status for output in step.outputs if output.error} == {500}
    assert set(rig.finish.values()) == {FinishReason.ERROR}
    assert set(rig.states.values()) == {State.FAILED}
    refusal = rig.submit(request("d"))
    assert refusal is not None
    assert refusal.reason == "dead"
    rig.run()
    assert rig.engine.live() == []


@pytest.mark.parametrize("own_pace", [True, False])
def test_a_frozen_engine_is_silent_and_then_goes_on(own_pace: bool) -> None:
    pacing = RequestPacing(random.Random(0), Duration(STEP_NS), Duration(STEP_NS)) if own_pace else None
    rig = Rig(pacing)
    rig.submit(request("a", 8, 10))
    rig.run(lambda: len(rig.tokens.get("a", [])) == 2)
    rig.engine.freeze(900_000)
    assert rig.engine.advance(899_999) == []
    assert rig.engine.next_event_at() == 900_000
    rig.run()
    assert rig.tokens["a"] == expected("a", 10)
    assert rig.now_ns >= 900_000 + 6 * STEP_NS


def test_limits_and_pace_change_between_steps() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(request("a", 8, 30), request("b", 8, 30))
    rig.step()
    rig.engine.advance(rig.now_ns)
    rig.engine.reconfigure(dataclasses.replace(rig.engine.config, max_num_seqs=2), StepPacing(7, 0, 0))
    assert rig.engine.next_event_at() == 2 * STEP_NS, "the step under way keeps its duration"
    rig.step()
    step = rig.step()
    assert step.at_ns == 2 * STEP_NS + 7
    assert step.stats is not None
    assert step.stats.running == 2
    with pytest.raises(ValueError, match="block_size cannot change while the engine runs"):
        rig.engine.reconfigure(dataclasses.replace(rig.engine.config, block_size=32))
    rig.run()
    assert rig.tokens == {"a": expected("a", 30), "b": expected("b", 30)}


def test_the_pace_changes_its_kind_while_sequences_run() -> None:
    rig = Rig()
    rig.submit(request("a", 8, 40), request("b", 30, 40))
    own = RequestPacing(random.Random(3), Duration(5_000), Duration(700))
    for pacing in (own, StepPacing(STEP_NS, 0, 0), own):
        rig.step()
        rig.engine.advance(rig.now_ns)
        rig.engine.reconfigure(rig.engine.config, pacing, now_ns=rig.now_ns)
        rig.step()
    rig.run()
    assert rig.tokens == {"a": expected("a", 40), "b": expected("b", 40)}


def test_debug_view_shows_what_a_sequence_holds() -> None:
    rig = _three_phases()
    rig.step()
    views = {view.request_id: view for view in rig.engine.live()}
    assert views["a"].output_tokens == len(rig.tokens["a"])
    assert views["b"].computed_tokens == 39
    assert len(views["b"].resources["blocks"]) == 5, "those of the chunk under way too"
    assert views["c"].resources == {}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_blocks", 1, "num_blocks is 1: must be at least 2"),
        ("block_size", 0, "block_size is 0: must be at least 1"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("policy", "lifo", "policy is 'lifo': must be 'fcfs' or 'priority'"),
        ("watermark", 1.0, "watermark is 1.0: must be at least 0 and below 1"),
        ("prefix_caching_hash_algo", "md5", "prefix_caching_hash_algo is 'md5': must be one of sha256"),
        ("max_num_queued_reqs", 0, "max_num_queued_reqs is 0"),
        (
            "max_model_len",
            10**6,
            r"num_blocks is 8192: the pool cannot hold .* Use at least 62501 blocks or max_model_len 131056",
        ),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmEngineConfig(**{field: value})  # type: ignore[arg-type]


def test_xxhash_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="hash_seed is missing"):
        VllmEngine(VllmEngineConfig(prefix_caching_hash_algo="xxhash"), StepPacing(1, 0, 0))
