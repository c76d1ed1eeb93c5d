"""The unified SGLang engine in virtual time (SGLang reference §5, §6.1, §9)."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.sglang.driving import MS, PACING, S, ending, make_engine, outputs, request, run, stats, tokens

from windtunnel.core.outputs import BlockRemoved, BlockStored, FinishReason
from windtunnel.core.pacing import Duration, RequestPacing
from windtunnel.core.sglang.config import POLICIES, SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine


def test_a_request_prefills_then_decodes_and_leaves_its_prompt_cached() -> None:
    engine = make_engine()
    assert engine.submit([request("a", 10, 3)], 0) is None
    steps = run(engine)
    assert tokens(steps, "a") == [1000, 1001, 1002]
    assert ending(steps, "a").finish_reason is FinishReason.LENGTH
    prefill_ns = 10 * MS + 10 * 10_000
    assert [step.at_ns for step in steps if step.outputs] == [prefill_ns, prefill_ns + 10 * MS, prefill_ns + 20 * MS]
    memory = engine.scheduler.memory
    assert (memory.used_tokens, memory.evictable_tokens) == (0, 12)


def test_a_long_prompt_is_cut_into_chunks_and_the_next_prompt_follows() -> None:
    engine = make_engine()
    engine.submit([request("long", 150, 1), request("short", 8, 1)], 0)
    steps = run(engine)
    assert [s.prefill_tokens for s in stats(steps) if s.prefill_tokens] == [64, 64, 30]
    assert tokens(steps, "long") == tokens(steps, "short") == [1000]


def test_a_shared_prefix_is_computed_once() -> None:
    engine = make_engine()
    engine.submit([request("a", range(40), 1)], 0)
    run(engine)
    engine.submit([request("b", [*range(30), *range(500, 510)], 1)], engine.clock_ns)
    steps = run(engine)
    assert ending(steps, "b").cached_tokens == 28
    assert stats(steps)[0].extra["cache_hit_rate"] == 28 / 40


def test_a_report_tells_what_was_evicted_since_the_last_one() -> None:
    engine = make_engine(max_total_num_tokens=64)
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        engine.submit([request(name, range(start, start + 40), 1)], engine.clock_ns)
        steps = run(engine)
        told = [report.extra["evicted_tokens"] for report in stats(steps)]
        assert told[0] == (0 if name == "a" else 40)
        assert not any(told[1:])


@pytest.mark.parametrize("key", ["cache_salt", "extra_key"])
def test_another_namespace_shares_nothing(key: str) -> None:
    engine = make_engine()
    engine.submit([request("a", range(40), 1)], 0)
    run(engine)
    engine.submit([request("b", range(40), 1, **{key: "x"})], engine.clock_ns)
    assert ending(run(engine), "b").cached_tokens == 0


def test_retraction_takes_the_shortest_output_first_and_loses_no_token() -> None:
    engine = make_engine(max_total_num_tokens=144, schedule_conservativeness=0.01)
    engine.submit([request("old", 24, 60)], 0)
    steps = run(engine, 200 * MS)
    engine.submit([request("new", 24, 60)], 200 * MS)
    steps += run(engine)
    retracted = [t.request_id for step in steps for t in step.transitions if t.event.value == "preempt"]
    assert retracted[0] == "new"
    assert set(retracted) == {"new"}
    assert tokens(steps, "new") == tokens(steps, "old") == [1000 + i % 7 for i in range(60)]
    assert sum(s.preemptions for s in stats(steps)) == len(retracted)


def test_the_new_token_ratio_decays_and_a_retraction_raises_it() -> None:
    engine = make_engine(max_total_num_tokens=128)
    ratio = engine.scheduler.ratio
    assert (ratio.initial, round(ratio.least, 6)) == (0.7, 0.14)
    for _ in range(601):
        ratio.decay()
    assert ratio.value == ratio.least
    engine.submit([request("a", 8, 40)], 0)
    run(engine, 30 * MS)
    ratio.raise_after_retraction(engine.scheduler.running)
    assert ratio.value == pytest.approx((len(engine.sequences["a"].output) + 20) / 40)


def test_a_lone_request_that_outgrows_the_pool_cannot_exist() -> None:
    engine = make_engine(max_total_num_tokens=64)
    refusal = engine.submit([request("big", 60, 1)], 0)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (400, "too_long")
    engine.submit([request("fits", 40, 1000)], 0)
    assert len(tokens(run(engine), "fits")) == 60 - 40 - 1
    for size, taken in ((54, True), (55, False)):
        assert (engine.submit([request(f"of {size}", range(1000, 1000 + size), 1)], engine.clock_ns) is None) is taken
        run(engine)


def test_a_full_queue_refuses_with_sglangs_text() -> None:
    engine = make_engine(max_queued_requests=2)
    assert engine.submit([request("a"), request("b")], 0) is None
    refusal = engine.submit([request("c")], 0)
    assert refusal is not None
    assert (refusal.status, refusal.message) == (503, "The request queue is full.")
    assert set(engine.sequences) == {"a", "b"}


def test_abort_while_waiting() -> None:
    engine = make_engine(max_running_requests=1)
    engine.submit([request("run", 8, 50), request("wait")], 0)
    run(engine, 100 * MS)
    assert engine.abort(["wait"], 100 * MS, notify=True) == 1
    end = ending(run(engine), "wait")
    assert end.error is not None
    assert (end.finish_reason, end.error.message, end.error.status) == (FinishReason.ABORT, "Abort in waiting queue", 200)


def test_abort_while_running_ends_with_the_next_step() -> None:
    engine = make_engine()
    engine.submit([request("a", 8, 50)], 0)
    run(engine, 55 * MS)
    engine.abort(["a"], 55 * MS, notify=True)
    steps = run(engine)
    end = ending(steps, "a")
    assert end.error is not None
    assert end.error.message == "Aborted"
    under_way, following = [step.at_ns for step in steps if outputs([step], "a")]
    assert following - under_way == 10 * MS
    assert engine.scheduler.memory.used_tokens == 0


def test_with_overlap_an_abort_comes_while_the_next_step_runs() -> None:
    engine = make_engine(overlap=True)
    engine.submit([request("a", 8, 50), request("b", 8, 20)], 0)
    run(engine, 55 * MS)
    engine.abort(["a"], 55 * MS)
    steps = run(engine)
    assert "a" not in engine.sequences
    assert len(tokens(steps, "a")) == 1
    assert len(tokens(steps, "b")) == 20 - 5


def test_overlap_lets_an_ended_sequence_take_part_once_more() -> None:
    plain, overlapped = make_engine(), make_engine(overlap=True)
    for engine in (plain, overlapped):
        engine.submit([request("a", 8, 5)], 0)
    ends = [max(step.at_ns for step in run(engine) if step.outputs) for engine in (plain, overlapped)]
    assert ends[0] == ends[1]
    assert overlapped._batches == plain._batches + 1


def test_abort_of_the_chunk_in_progress_frees_everything() -> None:
    engine = make_engine(disable_radix_cache=True)
    engine.submit([request("a", 300, 5)], 0)
    run(engine, 12 * MS)
    assert engine.scheduler.chunked is not None
    engine.abort(["a"], 12 * MS)
    run(engine)
    assert engine.scheduler.memory.pool.free_pages == 256


def test_abort_matches_prefixes_and_an_empty_id_only_with_abort_all() -> None:
    engine = make_engine()
    engine.submit([request("req-1"), request("req-10"), request("other")], 0)
    assert engine.abort_matching("", 0) == 0
    assert engine.abort_matching("req-1", 0) == 2
    assert engine.abort_matching("", 0, abort_all=True) == 1


@pytest.mark.parametrize(("mode", "left"), [("abort", 0), ("retract", 2), ("in_place", 2)])
def test_pause_and_continue(mode: str, left: int) -> None:
    engine = make_engine()
    engine.submit([request("a", 8, 30), request("b", 8, 30)], 0)
    before = run(engine, 100 * MS)
    engine.pause(mode, 100 * MS)  # type: ignore[arg-type]
    engine.submit([request("late", 8, 2)], 100 * MS)
    before += run(engine, 5 * S)
    assert len(engine.sequences) == left + 1
    assert not tokens(before, "late")
    assert (engine.scheduler.memory.used_tokens > 0) == (mode == "in_place")
    engine.resume(6 * S)
    steps = before + run(engine)
    assert len(tokens(steps, "late")) == 2
    if left:
        assert tokens(steps, "a") == [1000 + i % 7 for i in range(30)]


def test_flush_needs_an_idle_engine() -> None:
    engine = make_engine()
    engine.submit([request("a", 8, 2)], 0)
    assert not engine.flush_cache(0)
    run(engine)
    assert engine.flush_cache(engine.clock_ns)
    run(engine)
    assert engine.scheduler.memory.pool.free_pages == 256


def test_gauges_are_written_with_prefills_every_fortieth_decode_step_and_when_idle() -> None:
    engine = make_engine()
    engine.submit([request("a", 8, 100)], 0)
    reported = [(step.at_ns, step.stats) for step in run(engine) if step.stats is not None]
    first_ns = 10 * MS + 8 * 10_000
    assert [at - first_ns for at, _ in reported] == [0, 400 * MS, 800 * MS, 990 * MS]
    assert [s.running for _, s in reported] == [0, 1, 1, 0]
    assert sum(s.decode_tokens for _, s in reported) == 99
    assert reported[1][1].extra["gen_throughput"] == pytest.approx(40 / 0.41008)
    assert reported[-1][1].extra["gen_throughput"] == 0


def test_an_idle_engine_with_stale_gauges_reports_once_after_thirty_seconds() -> None:
    engine = make_engine()
    engine.submit([request("a", 8, 3)], 0)
    steps = run(engine)
    assert [step.at_ns for step in steps if step.stats] == [10_080_000, 10_080_000 + 30 * S]
    assert engine.next_event_at() is None


def test_waiting_and_running_timeouts_answer_503() -> None:
    engine = make_engine(max_running_requests=1, req_waiting_timeout_ns=50 * MS, req_running_timeout_ns=100 * MS)
    engine.submit([request("a", 8, 1000), request("b", 8, 1)], 0)
    steps = run(engine)
    waited, ran = ending(steps, "b").error, ending(steps, "a").error
    assert waited is not None
    assert ran is not None
    assert (waited.status, waited.message) == (503, "Request waiting timeout reached.")
    assert (ran.status, ran.message) == (503, "Request running timeout reached.")


def test_grammar_queue_defers_and_aborts_with_400() -> None:
    engine = make_engine()
    engine.submit([request("a", deferred_until_ns=S), request("b", deferred_until_ns=S)], 0)
    engine.abort(["b"], 0, notify=True)
    steps = run(engine)
    error = ending(steps, "b").error
    assert error is not None
    assert error.status == 400
    assert min(step.at_ns for step in steps if tokens([step], "a")) > S


def test_pacing_by_sequence_keeps_each_sequences_own_times() -> None:
    pacing = RequestPacing(Random(1), ttft=Duration(100 * MS), itl=Duration(20 * MS))
    engine = SglangEngine(SglangEngineConfig(max_total_num_tokens=1024), pacing, Random(1))
    engine.submit([request("a", 8, 3)], 0)
    run(engine, 30 * MS)
    engine.submit([request("b", 8, 3)], 30 * MS)
    steps = run(engine)
    times = {name: [step.at_ns // MS for step in steps if tokens([step], name)] for name in "ab"}
    assert times == {"a": [100, 120, 140], "b": [130, 150, 170]}


def test_a_late_driver_costs_an_arrival_nothing() -> None:
    pacing = RequestPacing(Random(1), ttft=Duration(100 * MS), itl=Duration(20 * MS))
    engine = SglangEngine(SglangEngineConfig(max_total_num_tokens=1024), pacing, Random(1))
    engine.submit([request("a", 8, 3)], 10 * MS)
    engine.advance(30 * MS)
    assert [step.at_ns for step in run(engine) if tokens([step], "a")][:1] == [110 * MS]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_full_engine_does(leaves: bool) -> None:
    pacing = RequestPacing(Random(1), ttft=Duration(100 * MS), itl=Duration(20 * MS))
    engine = SglangEngine(SglangEngineConfig(max_total_num_tokens=1024, max_running_requests=1), pacing, Random(1))
    engine.submit([request("a", 8, 3)], 0)
    engine.advance(0)
    engine.submit([request("b", 8, 3)], 10 * MS)
    engine.advance(10 * MS)
    if leaves:
        engine.abort(["a"], 90 * MS)
    first = next(step.at_ns for step in run(engine) if tokens([step], "b"))
    assert first == (190 * MS if leaves else 240 * MS), "b counts from its admission"


def test_kv_events_replay_to_the_cache() -> None:
    engine = make_engine(collect_kv_events=True, max_total_num_tokens=256)
    steps = []
    for index in range(12):
        engine.submit([request(f"r{index}", [*range(20), *range(index * 100, index * 100 + 40)], 2)], engine.clock_ns)
        steps += run(engine)
    index: set[bytes] = set()
    for step in steps:
        for event in step.kv_events:
            if isinstance(event, BlockStored):
                assert event.parent_hash is None or event.parent_hash in index
                index |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                index -= set(event.block_hashes)
    assert index == engine.scheduler.memory.tree.cached_digests
    assert any(isinstance(event, BlockRemoved) for step in steps for event in step.kv_events)


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="shortest-prefill-first"):
        SglangEngineConfig(schedule_policy="lifo")


_PROMPTS = {
    "first": {"prompt": range(1000, 1060), "tokens": 2, "priority": 1, "routing_key": "x"},
    "cached": {"prompt": [*range(40), *range(70, 80)], "tokens": 3, "priority": 2, "routing_key": "y"},
    "short": {"prompt": range(2000, 2010), "tokens": 4, "priority": 9, "routing_key": "x"},
    "long": {"prompt": range(3000, 3060), "tokens": 50, "priority": 5, "routing_key": "x"},
}


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["first", "cached", "short", "long"]),
        ("lpm", ["cached", "first", "short", "long"]),
        ("dfs-weight", ["first", "short", "long", "cached"]),
        ("lof", ["long", "short", "cached", "first"]),
        ("priority", ["short", "long", "cached", "first"]),
        ("routing-key", ["cached", "first", "short", "long"]),
        ("shortest-prefill-first", ["cached", "short", "first", "long"]),
        ("hrrn", ["cached", "short", "first", "long"]),
    ],
)
def test_policies_order_the_queue(policy: str, order: list[str]) -> None:
    engine = make_engine(schedule_policy=policy, max_running_requests=2, context_length=400)
    engine.submit([request("warm", range(40), 1)], 0)
    run(engine)
    now_ns = engine.clock_ns
    engine.submit([request("blocker", 8, 200, routing_key="y"), request("blocker2", 8, 200)], now_ns)
    run(engine, now_ns + 100 * MS)
    now_ns = engine.clock_ns
    engine.submit([request(name, **fields) for name, fields in _PROMPTS.items()], now_ns)
    run(engine, now_ns + 50 * MS)
    engine.abort(["blocker2"], now_ns + 50 * MS)
    steps = run(engine)
    started = [t.request_id for step in steps for t in step.transitions if t.event.value == "schedule"]
    assert started == order


def test_the_random_policy_draws_from_the_injected_chance() -> None:
    orders = []
    for seed in (1, 1, 2):
        engine = make_engine(seed, schedule_policy="random", max_running_requests=1)
        engine.submit([request(f"r{index}", 8, 1) for index in range(8)], 0)
        steps = run(engine)
        orders.append([t.request_id for step in steps for t in step.transitions if t.event.value == "schedule"])
    assert orders[0] == orders[1] != orders[2]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    page_size=st.sampled_from([1, 4]),
    radix=st.booleans(),
    lock_step=st.booleans(),
)
def test_every_sequence_ends_once_and_nothing_leaks(
    seed: int, policy: str, overlap: bool, page_size: int, radix: bool, lock_step: bool
) -> None:
    assert _chaos(seed, policy, overlap, page_size, radix, lock_step) == _chaos(
        seed, policy, overlap, page_size, radix, lock_step
    )


def _chaos(seed: int, policy: str, overlap: bool, page_size: int, radix: bool, lock_step: bool) -> str:
    chance = Random(seed)
    config = SglangEngineConfig(
        max_total_num_tokens=160,
        page_size=page_size,
        chunked_prefill_size=32,
        max_running_requests=6,
        schedule_policy=policy,
        schedule_conservativeness=0.1,
        overlap=overlap,
        disable_radix_cache=not radix,
    )
    pacing = (
        PACING if lock_step else RequestPacing(Random(seed), ttft=Duration(20 * MS, 5 * MS, "normal"), itl=Duration(5 * MS))
    )
    engine = SglangEngine(config, pacing, Random(seed))
    steps = []
    submitted = 0
    for _ in range(20):
        now_ns = max(engine.clock_ns, engine.next_event_at() or 0)
        for _ in range(chance.randrange(4)):
            prompt = [*range(chance.randrange(1, 40)), *[chance.randrange(9) for _ in range(chance.randrange(50))]]
            engine.submit([request(f"r{submitted}", prompt, chance.randrange(1, 60))], now_ns)
            submitted += 1
        steps += run(engine, now_ns + chance.randrange(80) * MS)
        if engine.sequences and chance.random() < 0.5:
            engine.abort([chance.choice(list(engine.sequences))], max(now_ns, engine.clock_ns), notify=True)
    steps += run(engine)
    ended = [output.request_id for output in outputs(steps) if output.finish_reason is not None]
    assert sorted(ended) == sorted(f"r{index}" for index in range(submitted))
    memory = engine.scheduler.memory
    assert memory.available_tokens + memory.evictable_tokens == memory.capacity
    return repr(steps)


@pytest.mark.parametrize(("last", "told"), [("a", 2), (None, 0)])
def test_decode_reports_count_the_routing_keys_that_run_if_all_have_one(last: str | None, told: int) -> None:
    """Idle reports leave them as they are."""
    engine = make_engine()
    for at, key in enumerate(["a", "b", "a", last]):
        engine.submit([request(f"r{at}", 8, 60, routing_key=key)], 0)
    said = [one.extra.get("num_unique_running_routing_keys", 0) for one in stats(run(engine))]
    assert said[0] == 0 and max(said) == said[-1] == told
