"""One scheduling step after another, as vLLM reference §5.2 orders it."""

import random
import weakref
from collections import Counter
from typing import Any

import pytest
from tests.core.rig import EOS, STEP_NS, Rig, expected, lora, request

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import FinishReason
from windtunnel.core.pacing import Duration, RequestPacing, StepPacing
from windtunnel.core.request import Repetition
from windtunnel.core.sources import SequenceSource
from windtunnel.core.vllm.sequence import VllmSequence


def test_a_request_lives_through_prefill_and_decode() -> None:
    rig = Rig()
    rig.submit(request("a", 20, 5))
    first = rig.step()
    assert first.at_ns == STEP_NS
    assert first.stats is not None
    assert (first.stats.running, first.stats.prefill_tokens, first.stats.decode_tokens) == (1, 20, 0)
    rig.run()
    assert rig.tokens["a"] == expected("a", 5)
    assert rig.finish["a"] is FinishReason.LENGTH
    assert [t.event for t in rig.log] == [Event.SUBMIT, Event.SCHEDULE, Event.FIRST_TOKEN, Event.FINISH]
    assert rig.steps[-1].at_ns == 5 * STEP_NS
    assert rig.steps[-1].stats is not None
    assert rig.steps[-1].stats.kv_usage == 0


def test_step_time_counts_prefill_tokens_and_sequences() -> None:
    rig = Rig(StepPacing(base_ns=100, prefill_token_ns=10, decode_seq_ns=1))
    rig.submit(request("a", 20, 3), request("b", 30, 3))
    assert rig.step().at_ns == 100 + 50 * 10
    assert rig.step().at_ns == 600 + 100 + 2


def test_lock_step_continues_where_the_last_step_ended() -> None:
    rig = Rig()
    rig.submit(request("a", 4, 6))
    late = rig.engine.advance(0) + rig.engine.advance(3 * STEP_NS + 500)
    assert [step.at_ns for step in late] == [STEP_NS, 2 * STEP_NS, 3 * STEP_NS]
    assert rig.engine.next_event_at() == 4 * STEP_NS


@pytest.mark.parametrize(("budget", "chunks"), [(16, [16, 16, 8]), (2048, [40]), (7, [7, 7, 7, 7, 7, 5])])
def test_a_prompt_is_chunked_by_the_budget(budget: int, chunks: list[int]) -> None:
    rig = Rig(max_num_batched_tokens=budget)
    rig.submit(request("a", 40, 1))
    rig.run()
    assert list(rig.stats("prefill_tokens")) == chunks


def test_the_long_prefill_threshold_leaves_budget_for_others() -> None:
    rig = Rig(long_prefill_token_threshold=10)
    rig.submit(request("long", 25, 1), request("short", 5, 1))
    first = rig.step()
    assert first.stats is not None
    assert first.stats.prefill_tokens == 15
    assert [output.request_id for output in first.outputs] == ["short"]


def test_running_sequences_take_the_budget_before_admissions() -> None:
    rig = Rig(max_num_batched_tokens=10)
    rig.submit(request("a", 10, 20))
    rig.step()
    rig.submit(request("b", 30, 1))
    rig.step()
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.decode_tokens, step.stats.prefill_tokens) == (1, 9)


def test_places_are_limited_and_taken_in_order() -> None:
    rig = Rig(max_num_seqs=2)
    rig.submit(*[request(name, 8, 4) for name in "abcd"])
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.running, step.stats.waiting) == (2, 2)
    assert rig.ids(State.DECODE) == ["a", "b"]
    rig.run()
    order = [t.request_id for t in rig.log if t.event is Event.SCHEDULE]
    assert order == ["a", "b", "c", "d"]


def test_the_first_that_does_not_fit_blocks_all_behind_it() -> None:
    rig = Rig(num_blocks=11, max_model_len=160)
    rig.submit(request("a", 90, 40), request("big", 80, 4), request("small", 4, 4))
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.running, step.stats.waiting) == (1, 2)
    rig.run()
    order = [t.request_id for t in rig.log if t.event is Event.SCHEDULE]
    assert order == ["a", "big", "small"]


def test_without_reserve_full_isl_a_first_chunk_is_enough() -> None:
    admitted = {}
    for reserve in (True, False):
        rig = Rig(num_blocks=11, max_model_len=160, max_num_batched_tokens=100, reserve_full_isl=reserve)
        rig.submit(request("a", 90, 40), request("big", 80, 4))
        rig.step()
        admitted[reserve] = [t.request_id for t in rig.log if t.event is Event.SCHEDULE]
    assert admitted == {True: ["a"], False: ["a", "big"]}


def test_the_watermark_holds_back_admissions_only_while_others_run() -> None:
    rig = Rig(num_blocks=11, max_model_len=160, watermark=0.5)
    rig.submit(request("a", 100, 2), request("b", 20, 2))
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.running, step.stats.waiting) == (1, 1)
    rig.run()
    assert set(rig.finish) == {"a", "b"}


def test_fcfs_preempts_the_last_and_recomputes_it_in_front() -> None:
    rig = Rig(num_blocks=11, max_model_len=160, enable_prefix_caching=False)
    rig.submit(request("a", 64, 40), request("b", 64, 40))
    rig.run(lambda: rig.count(Event.PREEMPT) > 0)
    preempted = next(t for t in rig.log if t.event is Event.PREEMPT)
    assert preempted.request_id == "b"
    rig.run()
    assert rig.tokens["b"] == expected("b", 40), "output before the preemption is kept, and nothing is said twice"
    again = [t for t in rig.log if t.event is Event.SCHEDULE and t.request_id == "b"][1]
    assert again.detail is not None
    assert again.detail["prompt_tokens"] == 64 + preempted.detail["output_tokens"]
    assert sum(rig.stats("preemptions")) == rig.count(Event.PREEMPT)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    rig = Rig(num_blocks=11, max_model_len=160, max_num_seqs=2, policy="priority")
    rig.submit(request("best", 64, 40, priority=0), request("worst", 64, 40, priority=9))
    rig.step()
    rig.submit(request("next", 4, 4, priority=1))
    rig.run(lambda: rig.count(Event.PREEMPT) > 0)
    preempted, after = rig.steps[-1], rig.step()
    assert preempted.stats is not None
    assert (preempted.stats.running, preempted.stats.waiting, preempted.stats.preemptions) == (1, 2, 1)
    assert [t.request_id for t in (*preempted.transitions, *after.transitions) if t.event is Event.SCHEDULE] == ["next"]
    assert next(t for t in rig.log if t.request_id == "next" and t.event is Event.SCHEDULE).at_ns == preempted.at_ns


def test_priority_preempts_the_worst() -> None:
    rig = Rig(num_blocks=11, max_model_len=160, policy="priority")
    rig.submit(request("worst", 64, 40, priority=9), request("best", 64, 40, priority=0))
    rig.run(lambda: rig.count(Event.PREEMPT) > 0)
    assert [t.request_id for t in rig.log if t.event is Event.PREEMPT] == ["worst"]
    rig.run()
    assert rig.tokens["worst"] == expected("worst", 40)
    assert rig.tokens["best"] == expected("best", 40)


def test_priority_orders_the_queue_then_arrival() -> None:
    rig = Rig(max_num_seqs=1, policy="priority")
    rig.submit(request("late", 4, 1, priority=1, arrival_ns=5), request("early", 4, 1, priority=1, arrival_ns=3))
    rig.submit(request("urgent", 4, 1, priority=0, arrival_ns=9))
    rig.run()
    assert [t.request_id for t in rig.log if t.event is Event.SCHEDULE] == ["urgent", "early", "late"]


def test_a_deferred_request_is_skipped_and_keeps_its_place_in_front() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(request("slow", 4, 2, deferred_until_ns=2_500), request("b", 4, 3), request("c", 4, 3))
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.running, step.stats.waiting, step.stats.deferred) == (1, 1, 1)
    rig.run()
    assert [t.request_id for t in rig.log if t.event is Event.SCHEDULE] == ["b", "slow", "c"]
    assert [t.event for t in rig.log if t.request_id == "slow"][:4] == [Event.SUBMIT, Event.DEFER, Event.RESUME, Event.SCHEDULE]


def test_an_engine_with_only_deferred_requests_sleeps_until_their_time() -> None:
    rig = Rig()
    rig.submit(request("slow", 4, 1, deferred_until_ns=50_000))
    rig.event()
    assert rig.engine.next_event_at() == 50_000
    rig.run()
    assert rig.finish["slow"] is FinishReason.LENGTH


def test_lora_slots_defer_other_adapters_but_not_their_own() -> None:
    rig = Rig(max_loras=1)
    rig.submit(request("x1", 4, 3, lora=lora("x")), request("y", 4, 3, lora=lora("y")), request("x2", 4, 3, lora=lora("x")))
    rig.submit(request("plain", 4, 3))
    step = rig.step()
    assert step.stats is not None
    assert (step.stats.running, step.stats.deferred) == (3, 1)
    assert (step.stats.running_loras, step.stats.waiting_loras) == (("x",), ("y",))
    rig.run()
    assert set(rig.finish) == {"x1", "x2", "y", "plain"}
    assert [t.event for t in rig.log if t.request_id == "y"][:3] == [Event.SUBMIT, Event.DEFER, Event.RESUME]


def test_a_preempted_adapter_that_lost_its_slot_is_deferred() -> None:
    rig = Rig(num_blocks=11, max_model_len=160, max_loras=2)
    rig.submit(request("a", 64, 60, lora=lora("x")), request("b", 64, 40, lora=lora("y")))
    rig.run(lambda: rig.count(Event.PREEMPT) > 0)
    rig.submit(request("urgent", 4, 4, lora=lora("z")))
    rig.run()
    assert set(rig.finish) == {"a", "b", "urgent"}


def test_a_prompt_that_never_fits_blocks_the_queue_until_it_leaves() -> None:
    rig = Rig(num_blocks=5, max_model_len=160, unsafe_pool=True)
    rig.submit(request("huge", 100, 4), request("b", 8, 4))
    rig.run()
    assert rig.ids(State.QUEUED) == ["huge", "b"]
    assert rig.engine.next_event_at() is None, "a blocked engine rests; it does not spin"
    rig.abort("huge")
    rig.run()
    assert rig.tokens["b"] == expected("b", 4)


@pytest.mark.parametrize("reserve", [True, False])
def test_a_sequence_that_outgrows_the_pool_does_not_spin(reserve: bool) -> None:
    rig = Rig(num_blocks=5, max_model_len=160, unsafe_pool=True, reserve_full_isl=reserve)
    rig.submit(request("grows", 50, 100))
    rig.run()
    assert rig.ids(State.PREEMPTED) == ["grows"]
    rig.abort("grows")
    rig.run()
    assert rig.engine.live() == []


def test_stop_token_ids_and_eos_end_in_order_and_wait_for_min_tokens() -> None:
    rig = Rig(extra_eos_token_ids=frozenset({8888}))
    rig.submit(request("eos", 4, 20, source=SequenceSource([1, 2, EOS, 4])))
    rig.submit(request("end", 4, 20, source=SequenceSource([1, 2])))
    rig.submit(request("extra", 4, 20, source=SequenceSource([1, 8888])))
    rig.submit(request("stop", 4, 20, source=SequenceSource([1, 2, 7, 3]), stop_token_ids=frozenset({7})))
    rig.submit(request("min", 4, 20, source=SequenceSource([7, 2, 7, 3]), stop_token_ids=frozenset({7}), min_tokens=2))
    rig.submit(request("ignore", 4, 6, source=SequenceSource([1, EOS], ignore_eos=True), ignore_eos=True))
    rig.submit(request("both", 4, 3, source=SequenceSource([1, 2, 7]), stop_token_ids=frozenset({7})))
    rig.run()
    assert rig.tokens["eos"] == [1, 2, EOS]
    assert rig.tokens["end"] == [1, 2, EOS]
    assert rig.tokens["extra"] == [1, 8888]
    assert rig.tokens["stop"] == [1, 2, 7]
    assert rig.tokens["min"] == [7, 2, 7]
    assert rig.tokens["ignore"] == [1, EOS] * 3
    assert rig.finish.pop("ignore") is FinishReason.LENGTH
    assert set(rig.finish.values()) == {FinishReason.STOP}, "a stop token comes before the length"
    assert rig.stop_reason == {"eos": None, "end": None, "extra": 8888, "stop": 7, "min": 7, "both": 7, "ignore": None}


@pytest.mark.parametrize(
    ("text", "rule", "made"),
    [
        ([5, 1, 2, 1, 2, 1, 2, 9], Repetition(1, 4, 3), 7),
        ([5, 1, 2, 1, 2, 1, 2, 9], Repetition(3, 4, 2), 12),
        ([4, 4, 4, 4], Repetition(1, 1, 2), 2),
        ([1, 2, 3, 1, 2, 3], Repetition(1, 2, 2), 12),
        (list(range(40)) * 2, Repetition(1, 40, 2), 80),
        ([3, 7, 7], Repetition(1, 1, 2), 3),
    ],
)
def test_a_repetition_ends_a_sequence_last_of_all_reasons(text: list[int], rule: Repetition, made: int) -> None:
    rig = Rig()
    limit = 12 if made == 12 else 100
    rig.submit(request("a", 18, limit, source=SequenceSource([*text, *range(100, 200)], ignore_eos=True), repetition=rule))
    rig.run()
    assert len(rig.tokens["a"]) == made
    assert rig.finish["a"] is (FinishReason.LENGTH if made == 12 else FinishReason.REPETITION)


def test_eos_stop_tokens_and_length_come_before_a_repetition() -> None:
    rig = Rig()
    rule = Repetition(1, 1, 2)
    rig.submit(
        request("stop", 4, 9, source=SequenceSource([7, 7]), repetition=rule, stop_token_ids=frozenset({7}), min_tokens=2)
    )
    rig.submit(request("length", 4, 2, source=SequenceSource([5, 5, 5]), repetition=rule))
    rig.submit(request("eos", 4, 9, source=SequenceSource([EOS, EOS]), repetition=rule, min_tokens=2))
    rig.run()
    assert rig.finish == {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "eos": FinishReason.STOP}


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32])
@pytest.mark.parametrize("stop_at", [0, 1, 13, 14, 15, 16, 17, 31, 32, 40])
def test_a_stop_is_found_wherever_it_lies_in_a_block(block_size: int, stop_at: int) -> None:
    rig = Rig(num_blocks=1100, block_size=block_size)
    text = [*range(100, 100 + stop_at), 7, 8, 9]
    rig.submit(request("a", 18, 100, source=SequenceSource(text), stop_token_ids=frozenset({7})))
    rig.run()
    assert rig.tokens["a"] == text[: stop_at + 1]
    assert rig.stop_reason["a"] == 7


def test_the_context_ends_a_sequence_by_length() -> None:
    rig = Rig(max_model_len=30)
    rig.submit(request("a", 20, 500))
    rig.submit(request("full", 30, 500))
    rig.run()
    assert len(rig.tokens["a"]) == 10
    assert len(rig.tokens["full"]) == 1
    assert set(rig.finish.values()) == {FinishReason.LENGTH}


def test_a_batch_beyond_the_budget_takes_turns_without_loss() -> None:
    rig = Rig(max_num_batched_tokens=3, max_num_seqs=8)
    rig.submit(*[request(name, 2, 5) for name in "abcdefgh"])
    rig.run()
    assert rig.tokens == {name: expected(name, 5) for name in "abcdefgh"}
    assert all(p + d <= 3 for p, d in zip(rig.stats("prefill_tokens"), rig.stats("decode_tokens"), strict=True))


def test_a_sequence_that_preempted_itself_does_not_come_back_in_the_same_instant() -> None:
    pacing = RequestPacing(random.Random(0), Duration(50_000), Duration(1_000))
    rig = Rig(pacing, num_blocks=11, max_model_len=160, max_num_batched_tokens=20, reserve_full_isl=False)
    rig.submit(request("a", 90, 4), request("b", 100, 4))
    rig.run(lambda: rig.count(Event.PREEMPT) > 0)
    assert rig.now_ns == 0
    assert rig.engine.next_event_at() == 50_000
    rig.run()
    assert rig.tokens == {"a": expected("a", 4), "b": expected("b", 4)}


class Held(SequenceSource):
    """A source that can be asked whether anybody still has it."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_ended_request_is_held_by_nobody(policy: str) -> None:
    rig = Rig(policy=policy)
    source = Held((1, 2, 3))
    gone = weakref.ref(source)
    rig.submit(request("b", 100, 50), request("a", 100, 3, source=source))
    del source
    rig.run(lambda: "a" in rig.finish)
    assert gone() is None


def test_sequences_that_start_together_do_not_plan_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind their first plan at most a third of them makes the next one in the same step."""
    planned: list[int] = []
    start_plan = VllmSequence._start_plan

    def counted(self: VllmSequence, *args: Any) -> None:
        planned.append(step)
        start_plan(self, *args)

    monkeypatch.setattr(VllmSequence, "_start_plan", counted)
    rig, step = Rig(num_blocks=1025, max_num_batched_tokens=4096), 0
    rig.submit(*(request(f"r{number}", 20, 200) for number in range(64)))
    for step in range(200):  # noqa: B007 (read by `counted`)
        rig.step()
    counts = Counter(planned)
    assert counts.pop(min(counts)) == 64
    assert max(counts.values()) <= 64 // 3
