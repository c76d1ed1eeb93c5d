"""What feeds what (vLLM reference §4.6, §3.7, §3.8), on scripted lives and on random ones."""

from collections.abc import Sequence
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.lifecycle import Event, State, Transition, next_state
from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.request import EngineRequest, MediaItem
from windtunnel.core.units import MS, S
from windtunnel.wire.metrics import Histogram, Value, render
from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.media_cache import MEDIA_KEPT
from windtunnel.wire.vllm.metric_specs import token_buckets
from windtunnel.wire.vllm.metrics import VllmMetrics


class Words:
    def token_ids(self, start: int, count: int) -> Sequence[int]:
        return range(start, start + count)


class Bench:
    """A front end and an engine, both by hand. Owns the metrics under test and the state of each sequence."""

    def __init__(self, ranks: Sequence[int] = (0,), max_loras: int | None = None) -> None:
        labels = cache_config_labels(block_size=16, num_gpu_blocks=100, max_model_len=1600)
        self.metrics = VllmMetrics("m", ranks, 1600, labels, lambda: 5.0, max_loras)
        self.states: dict[str, State] = {}

    def submit(self, *names: str, prompt: int = 10, arrival_ms: int = 0, parent: str | None = None, rank: int = 0) -> None:
        requests = [
            EngineRequest(name, tuple(range(prompt)), Words(), max_tokens=64, arrival_ns=arrival_ms * MS, parent_id=parent)
            for name in names
        ]
        self.states |= dict.fromkeys(names, State.NEW)
        self.metrics.on_submitted(rank, requests)

    def step(
        self,
        at_ms: int,
        *events: tuple[str, Event],
        tokens: dict[str, int] | None = None,
        cached: int = 0,
        stats: StepStats | None = None,
        seen_ms: int | None = None,
        rank: int = 0,
    ) -> None:
        """One step: these transitions, so many tokens for each request, read by the front end at `seen_ms`."""
        outputs = [TokenOutput(name, tuple(range(count)), cached_tokens=cached) for name, count in (tokens or {}).items()]
        step = StepOutput(at_ms * MS, outputs, [self._go(at_ms, *event) for event in events], stats)
        self.metrics.on_step(rank, step, (at_ms if seen_ms is None else seen_ms) * MS)

    def _go(self, at_ms: int, name: str, event: Event) -> Transition:
        before = self.states[name]
        after = self.states[name] = next_state(before, event)
        return Transition(at_ms * MS, name, event, before, after)

    def finish(self, name: str, at_ms: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.metrics.on_finished(name, reason, at_ms * MS)

    def value(self, name: str, *labels: str, rank: int = 0) -> float:
        child = self.metrics.store.family(f"vllm:{name}").child("m", str(rank), *labels)
        assert isinstance(child, Value)
        return child.value

    def histogram(self, name: str, rank: int = 0) -> Histogram:
        child = self.metrics.store.family(f"vllm:{name}").child("m", str(rank))
        assert isinstance(child, Histogram)
        return child

    def observed(self, name: str) -> tuple[int, float]:
        return self.histogram(name).count, round(self.histogram(name).sum, 9)


FINISH_HISTOGRAMS = (
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_num_preemptions", "request_prefill_kv_computed_tokens",
)  # fmt: skip


def one_life(bench: Bench) -> None:
    """Arrives at 0, queued at 1, scheduled at 5, tokens at 105, 125 and 165 ms; each read 2 ms later."""
    bench.submit("a", prompt=10)
    bench.step(1, ("a", Event.SUBMIT))
    bench.step(5, ("a", Event.SCHEDULE))
    bench.step(105, ("a", Event.FIRST_TOKEN), tokens={"a": 1}, cached=4, seen_ms=107)
    bench.step(125, tokens={"a": 1}, seen_ms=127)
    bench.step(165, ("a", Event.FINISH), tokens={"a": 1}, seen_ms=167)


def test_a_whole_life() -> None:
    bench = Bench()
    one_life(bench)
    bench.finish("a", 168, FinishReason.LENGTH)
    assert {name: bench.observed(name) for name in FINISH_HISTOGRAMS} == {
        "request_prompt_tokens": (1, 10),
        "request_generation_tokens": (1, 3),
        "request_max_num_generation_tokens": (1, 3),
        "request_params_n": (1, 1),
        "request_params_max_tokens": (1, 64),
        "request_time_per_output_token_seconds": (1, 0.030),
        "e2e_request_latency_seconds": (1, 0.168),
        "request_queue_time_seconds": (1, 0.004),
        "request_inference_time_seconds": (1, 0.160),
        "request_prefill_time_seconds": (1, 0.100),
        "request_decode_time_seconds": (1, 0.060),
        "request_num_preemptions": (1, 0),
        "request_prefill_kv_computed_tokens": (1, 6),
    }
    assert bench.observed("time_to_first_token_seconds") == (1, 0.107)
    assert bench.observed("inter_token_latency_seconds") == (2, 0.060)
    assert bench.observed("iteration_tokens_total") == (3, 6 + 3)
    assert bench.value("request_success", "length") == 1
    assert list(bench.metrics.live()) == []


def test_prompt_counts_at_the_first_output_and_generation_with_each() -> None:
    bench = Bench()
    bench.submit("a", prompt=10)
    bench.step(1, ("a", Event.SUBMIT), ("a", Event.SCHEDULE), stats=StepStats(1, 0, 0, 0.1, prefill_tokens=10))
    assert (bench.value("prompt_tokens"), bench.value("generation_tokens")) == (0, 0)
    bench.step(2, ("a", Event.FIRST_TOKEN), tokens={"a": 1}, cached=4)
    assert bench.value("prompt_tokens") == 10
    assert bench.value("prompt_tokens_cached") == 4
    assert bench.value("prompt_tokens_by_source", "local_compute") == 6
    assert bench.value("prompt_tokens_by_source", "local_cache_hit") == 4
    bench.step(3, tokens={"a": 5}, cached=4)
    assert (bench.value("prompt_tokens"), bench.value("generation_tokens")) == (10, 6)
    assert bench.histogram("inter_token_latency_seconds").count == 1, "one gap for each output, however many tokens it brings"


def test_gauges_move_only_with_statistics() -> None:
    bench = Bench()
    bench.step(1, stats=StepStats(running=3, waiting=2, deferred=1, kv_usage=0.25, prefix_queries=100, prefix_hits=40))
    bench.step(2)
    assert bench.value("num_requests_running") == 3
    assert bench.value("num_requests_waiting") == 3
    assert bench.value("num_requests_waiting_by_reason", "capacity") == 2
    assert bench.value("num_requests_waiting_by_reason", "deferred") == 1
    assert bench.value("kv_cache_usage_perc") == 0.25
    assert (bench.value("prefix_cache_queries"), bench.value("prefix_cache_hits")) == (100, 40)
    assert bench.value("prompt_tokens_cached_by_source", "device") == 40
    bench.step(3, stats=StepStats(0, 0, 0, 0.0, prefix_queries=10))
    assert (bench.value("num_requests_running"), bench.value("kv_cache_usage_perc")) == (0, 0)
    assert bench.value("prefix_cache_queries") == 110


@pytest.mark.parametrize("late_output", [False, True])
def test_a_disconnect_leaves_only_what_was_seen_before(late_output: bool) -> None:
    bench = Bench()
    one_life(bench)
    bench.metrics.on_dropped(["a", "never-known"])
    if late_output:
        bench.step(200, tokens={"a": 1})
        bench.finish("a", 201, FinishReason.ABORT)
    assert bench.value("prompt_tokens") == 10
    assert bench.value("generation_tokens") == 3
    assert bench.histogram("time_to_first_token_seconds").count == 1
    assert bench.histogram("inter_token_latency_seconds").count == 2
    assert [bench.histogram(name).count for name in FINISH_HISTOGRAMS] == [0] * len(FINISH_HISTOGRAMS)
    assert [bench.value("request_success", reason.value) for reason in FinishReason] == [0] * len(FinishReason)
    assert list(bench.metrics.live()) == []


def test_an_abort_by_pause_is_a_final_output_and_counts() -> None:
    bench = Bench()
    one_life(bench)
    bench.finish("a", 170, FinishReason.ABORT)
    assert bench.value("request_success", "abort") == 1
    assert [bench.histogram(name).count for name in FINISH_HISTOGRAMS] == [1] * len(FINISH_HISTOGRAMS)


def test_a_preemption_counts_with_the_next_output_of_its_request() -> None:
    bench = Bench()
    bench.submit("a", "b")
    everyone = ("a", "b")
    bench.step(1, *((name, Event.SUBMIT) for name in everyone))
    bench.step(2, *((name, Event.SCHEDULE) for name in everyone))
    bench.step(10, *((name, Event.FIRST_TOKEN) for name in everyone), tokens=dict.fromkeys(everyone, 1))
    bench.step(20, *((name, Event.PREEMPT) for name in everyone), stats=StepStats(0, 2, 0, 0.0, preemptions=2))
    assert bench.value("num_preemptions") == 0
    bench.step(30, ("a", Event.SCHEDULE))
    bench.step(40, ("a", Event.FIRST_TOKEN), tokens={"a": 1})
    assert bench.value("num_preemptions") == 1
    bench.step(50, ("a", Event.FINISH), tokens={"a": 1})
    bench.finish("a", 50)
    bench.metrics.on_dropped(["b"])
    assert bench.value("num_preemptions") == 1, "b never spoke again"
    assert bench.observed("request_num_preemptions") == (1, 1)
    assert bench.observed("request_queue_time_seconds") == (1, 0.001), "the first SCHEDULE counts"
    assert bench.observed("request_prefill_time_seconds") == (1, 0.008)
    assert bench.observed("inter_token_latency_seconds") == (2, 0.040), "the pause is one gap"


def test_choices_of_one_prompt_count_n_once_and_the_prompt_each() -> None:
    bench = Bench()
    bench.submit("p-0", "p-1", "p-2", prompt=10, parent="p")
    bench.submit("q", prompt=7)
    for number, name in enumerate(("p-0", "p-1", "p-2", "q"), 1):
        bench.step(number, (name, Event.SUBMIT), (name, Event.SCHEDULE))
        bench.step(number, (name, Event.FIRST_TOKEN), (name, Event.FINISH), tokens={name: number})
        bench.finish(name, 10)
        assert bench.observed("request_params_n") == {1: (0, 0), 2: (0, 0), 3: (1, 3), 4: (2, 4)}[number]
    assert bench.observed("request_max_num_generation_tokens") == (2, 3 + 4)
    assert bench.observed("request_prompt_tokens") == (4, 37)
    assert bench.value("prompt_tokens") == 37


def test_a_request_aborted_in_the_queue_has_times_of_zero() -> None:
    bench = Bench()
    bench.submit("a", arrival_ms=3)
    bench.step(4, ("a", Event.SUBMIT))
    bench.finish("a", 9, FinishReason.ABORT)
    assert bench.observed("e2e_request_latency_seconds") == (1, 0.006)
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds"):
        assert bench.observed(name) == (1, 0)


def test_rejections_count_by_queue_limit_only() -> None:
    bench = Bench()
    for reason in ("max_num_queued_reqs", "max_num_queued_reqs", "max_num_queued_tokens", "paused"):
        bench.metrics.on_rejected(reason)
    text = render(bench.metrics.store).decode()
    assert 'vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"} 2.0' in text
    assert 'vllm:admission_rejections_total{model_name="m",reason="max_num_queued_tokens"} 1.0' in text
    assert 'reason="paused"' not in text


def test_engines_are_counted_apart() -> None:
    bench = Bench(ranks=(0, 3))
    bench.submit("a", rank=3)
    bench.step(1, ("a", Event.SUBMIT), ("a", Event.SCHEDULE), rank=3, stats=StepStats(1, 0, 0, 0.5))
    bench.step(2, ("a", Event.FIRST_TOKEN), ("a", Event.FINISH), tokens={"a": 1}, rank=3)
    bench.finish("a", 3)
    assert bench.value("request_success", "stop", rank=3) == 1
    assert bench.value("request_success", "stop", rank=0) == 0
    assert (bench.value("num_requests_running", rank=0), bench.value("num_requests_running", rank=3)) == (0, 1)


def media(name: str, *identifiers: str, parent: str | None = None) -> EngineRequest:
    items = tuple(MediaItem(identifier, 0, 1) for identifier in identifiers)
    return EngineRequest(name, (1, 2), Words(), max_tokens=4, arrival_ns=0, parent_id=parent, media=items)


def test_media_are_looked_up_once_for_a_prompt_and_told_with_the_next_step() -> None:
    """vLLM 0.33: the front end's processor cache counts items; its numbers travel with the engine's statistics."""
    bench = Bench()

    def told() -> tuple[float, float]:
        bench.metrics.on_step(0, StepOutput(1, stats=StepStats(0, 0, 0, 0.0)), 1)
        return bench.value("mm_cache_queries"), bench.value("mm_cache_hits")

    bench.metrics.on_submitted(0, [media("a", "cat", "dog", "cat"), media("b", "dog")])
    assert bench.value("mm_cache_queries") == 0
    assert told() == (4, 2)
    bench.metrics.on_submitted(0, [media(name, "cow", parent="p") for name in ("0_p", "1_p")])
    assert told() == (5, 2)
    bench.metrics.reset_media()
    bench.metrics.on_submitted(0, [media("c", "cat")])
    assert told() == (6, 2)


def test_the_media_that_are_remembered_are_the_last_ones() -> None:
    bench = Bench()
    for number in range(MEDIA_KEPT + 1):
        bench.metrics.on_submitted(0, [media(str(number), f"item{number}")])
    bench.metrics.on_submitted(0, [media("last", f"item{MEDIA_KEPT}"), media("first", "item0")])
    bench.metrics.on_step(0, StepOutput(1, stats=StepStats(0, 0, 0, 0.0)), 1)
    assert (bench.value("mm_cache_queries"), bench.value("mm_cache_hits")) == (MEDIA_KEPT + 3, 1)


def test_sleep_states_exclude_each_other() -> None:
    bench = Bench()
    bench.metrics.on_sleep(0, "discard_all")
    states = ("awake", "weights_offloaded", "discard_all")
    assert [bench.value("engine_sleep_state", state) for state in states] == [0, 0, 1]
    with pytest.raises(ValueError, match="'tired' is none of awake"):
        bench.metrics.on_sleep(0, "tired")


def test_http_leaves_out_the_probes_and_groups_status() -> None:
    bench = Bench()
    for handler, status in (
        ("/metrics", 200),
        ("/health", 503),
        ("none", 404),
        ("/v1/completions", 200),
        ("/v1/completions", 201),
    ):
        bench.metrics.on_http(handler, "GET", status, 0.2, 7, 11)
    text = render(bench.metrics.store).decode()
    assert 'http_requests_total{handler="/v1/completions",method="GET",status="2xx"} 2.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in text
    assert 'http_request_size_bytes_sum{handler="/v1/completions"} 14.0' in text
    assert 'http_response_size_bytes_count{handler="/v1/completions"} 2.0' in text
    assert 'http_request_duration_seconds_bucket{handler="none",le="0.1",method="GET"} 0.0' in text
    assert 'http_request_duration_seconds_bucket{handler="none",le="0.5",method="GET"} 1.0' in text
    assert "http_request_duration_highr_seconds_count 3.0" in text
    assert '"/metrics"' not in text
    assert '"/health"' not in text


def test_tool_parser_counts_by_mode_and_outcome() -> None:
    bench = Bench()
    bench.metrics.on_tool_parser(streaming=True, called=False, request_type="chat_completions", times=5)
    bench.metrics.on_tool_parser(streaming=False, called=True, request_type="messages")
    text = render(bench.metrics.store).decode()
    assert 'mode="streaming",model_name="m",outcome="no_tool_call",request_type="chat_completions"} 5.0' in text
    assert 'mode="non_streaming",model_name="m",outcome="tool_call",request_type="other"} 1.0' in text


def test_the_lora_gauge_exists_only_with_lora() -> None:
    assert b"lora_requests_info" not in render(Bench().metrics.store)
    bench = Bench(max_loras=2)
    bench.step(1, stats=StepStats(1, 1, 0, 0.1, running_loras=("x", "y"), waiting_loras=("z",)))
    line = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="x,y",waiting_lora_adapters="z"} 5.0'
    assert line in render(bench.metrics.store).decode()


def test_token_buckets_end_at_the_context() -> None:
    assert token_buckets(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_buckets(2000)[-1] == 2000
    assert token_buckets(1999)[-1] == 1000
    assert token_buckets(1) == (1,)


def test_cache_config_refuses_unknown_labels() -> None:
    with pytest.raises(ValueError, match="no label block_sise"):
        cache_config_labels(block_size=16, num_gpu_blocks=1, max_model_len=16, block_sise=3)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 50),
            st.lists(st.tuples(st.integers(1, 100), st.integers(1, 4)), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_random_lives_stay_consistent(lives: list[tuple[int, list[tuple[int, int]], bool]]) -> None:
    """Sums of finish-time histograms equal the counters when nobody leaves, and never exceed them when some do."""
    bench = Bench()
    clock, left, gaps = 0, 0, 0.0
    for number, (prompt, outputs, leaves) in enumerate(lives):
        name = str(number)
        bench.submit(name, prompt=prompt, arrival_ms=clock)
        bench.step(clock, (name, Event.SUBMIT), (name, Event.SCHEDULE))
        for index, (gap, tokens) in enumerate(outputs):
            clock += gap
            gaps += gap * MS / S if index else 0
            bench.step(clock, *([] if index else [(name, Event.FIRST_TOKEN)]), tokens={name: tokens})
        bench.metrics.on_dropped([name]) if leaves else bench.finish(name, clock)
        left += leaves
    finished = len(lives) - left
    assert bench.value("request_success", "stop") == finished
    assert {bench.histogram(name).count for name in FINISH_HISTOGRAMS} == {finished}
    assert bench.histogram("time_to_first_token_seconds").count == len(lives)
    assert isclose(bench.histogram("inter_token_latency_seconds").sum, gaps, abs_tol=1e-9)
    assert bench.histogram("iteration_tokens_total").sum == bench.value("prompt_tokens") + bench.value("generation_tokens")
    shortfalls = [
        bench.value("prompt_tokens") - bench.histogram("request_prompt_tokens").sum,
        bench.value("generation_tokens") - bench.histogram("request_generation_tokens").sum,
        gaps - bench.histogram("request_decode_time_seconds").sum,
    ]
    assert all(short >= -1e-9 for short in shortfalls)
    assert left or all(isclose(short, 0, abs_tol=1e-9) for short in shortfalls)
