"""The `sglang:` metrics: what the table says, and when what moves (SGLang reference §6.1, Appendix A)."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from windtunnel.core.lifecycle import Event, State, Transition
from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.sources import SequenceSource
from windtunnel.core.units import MS, S
from windtunnel.wire.sglang.metrics import SglangMetrics

SCHEDULER = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
TOKENIZER = {"model_name": "m", "engine_type": "unified"}


def metrics(ranks: int = 1, **options: Any) -> SglangMetrics:
    return SglangMetrics("m", ranks, lambda: 0.0, **options)


def samples(made: SglangMetrics, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    families = text_string_to_metric_families(made.store.text().decode())
    return {tuple(sorted(s.labels.items())): s.value for f in families for s in f.samples if s.name == f"sglang:{name}"}


def value(made: SglangMetrics, name: str, labels: dict[str, str]) -> float:
    return samples(made, name)[tuple(sorted(labels.items()))]


def report(**extra: float) -> StepOutput:
    stats = StepStats(3, 2, 1, 0.5, prefill_tokens=10, decode_tokens=4, preemptions=1, prefix_hits=6, extra=extra)
    return StepOutput(0, stats=stats)


def submit(made: SglangMetrics, *, stream: bool = False, rank: int = 0) -> None:
    request = EngineRequest("r", (1, 2, 3), SequenceSource(()), 9, arrival_ns=0, tags={"stream": str(stream).lower()})
    made.on_submitted(rank, [request])


def output(at_ns: int, *tokens: int, reason: FinishReason | None = None, cached: int = 0) -> StepOutput:
    return StepOutput(at_ns, [TokenOutput("r", tokens, reason, None, cached)])


def test_gauges_and_scheduler_counters_move_with_a_report_only() -> None:
    made = metrics()
    made.on_step(0, report(token_usage=0.5, num_grammar_queue_reqs=1, unknown=9), 0)
    assert value(made, "num_running_reqs", SCHEDULER) == 3
    assert value(made, "num_queue_reqs", SCHEDULER) == 2
    assert value(made, "num_grammar_queue_reqs", SCHEDULER) == 1
    assert value(made, "token_usage", SCHEDULER) == 0.5
    modes = {mode: value(made, "realtime_tokens_total", SCHEDULER | {"mode": mode}) for mode in ("prefill_cache", "decode")}
    assert modes == {"prefill_cache": 6, "decode": 4}
    assert value(made, "num_retracted_requests_total", SCHEDULER) == 1
    made.on_step(0, StepOutput(5), 5)
    assert value(made, "num_running_reqs", SCHEDULER) == 3
    assert made.reported(0)["unknown"] == 9


def test_labels_of_ranks() -> None:
    made = metrics(2, tp_ranks=(0, 1))
    made.on_step(1, report(), 0)
    found = samples(made, "num_running_reqs")
    assert {(dict(labels)["dp_rank"], dict(labels)["tp_rank"]): told for labels, told in found.items()} == {
        ("0", "0"): 0,
        ("0", "1"): 0,
        ("1", "0"): 3,
        ("1", "1"): 3,
    }
    assert "dp_rank" not in dict(next(iter(samples(made, "num_aborted_requests_total"))))


def test_the_tokenizer_manager_counts_a_request_when_it_ends() -> None:
    made = metrics()
    submit(made, stream=True)
    streaming = TOKENIZER | {"is_streaming": "true"}
    made.on_step(0, output(250 * MS, 7, cached=2), 250 * MS)
    assert value(made, "time_to_first_token_seconds_sum", streaming) == 0.25
    assert (*streaming.items(),) not in samples(made, "prompt_tokens_total")
    made.on_step(0, output(260 * MS, 8), 260 * MS)
    made.on_step(0, output(300 * MS, 9, reason=FinishReason.STOP), 300 * MS)
    made.on_finished("r", FinishReason.STOP, 300 * MS)
    assert value(made, "inter_token_latency_seconds_count", TOKENIZER) == 2
    assert value(made, "inter_token_latency_seconds_sum", TOKENIZER) == pytest.approx(0.05)
    assert value(made, "prompt_tokens_total", streaming) == 3
    assert value(made, "generation_tokens_total", streaming) == 3
    assert value(made, "cached_tokens_total", TOKENIZER | {"cache_source": "device"}) == 2
    assert value(made, "e2e_request_latency_seconds_sum", streaming) == 0.3
    assert value(made, "request_time_per_output_token_seconds_sum", streaming) == pytest.approx(0.025)  # (0.3 - 0.25) / 2


def test_an_abort_is_counted_once_and_a_request_without_output_not_at_all() -> None:
    made = metrics()
    submit(made)
    made.on_dropped(["r"])
    made.on_dropped(["r", "unknown"])
    submit(made)
    made.on_finished("r", FinishReason.ABORT, S)
    assert value(made, "num_aborted_requests_total", TOKENIZER) == 1
    assert samples(made, "num_requests_total") == {}


def test_what_an_aborted_request_has_generated_is_counted() -> None:
    made = metrics()
    submit(made)
    made.on_step(0, output(S, 7, 8), S)
    made.on_dropped(["r"])
    made.on_finished("r", FinishReason.ABORT, 2 * S)
    assert value(made, "generation_tokens_total", TOKENIZER | {"is_streaming": "false"}) == 2
    assert value(made, "num_requests_total", TOKENIZER | {"is_streaming": "false"}) == 1


@pytest.mark.parametrize(
    ("engine_type", "tokens", "reason", "seen"),
    [
        ("unified", 3, FinishReason.LENGTH, [1, 1, 1]),
        ("unified", 1, FinishReason.LENGTH, [1, 0, 0]),
        ("unified", 3, FinishReason.ABORT, [1, 1, 0]),
        ("decode", 3, FinishReason.STOP, [1, 1, 1]),
        ("prefill", 1, FinishReason.LENGTH, [0, 0, 0]),
    ],
)
def test_token_times_are_those_of_who_decodes_to_a_natural_end(
    engine_type: str, tokens: int, reason: FinishReason, seen: list[int]
) -> None:
    made = metrics(engine_type=engine_type)
    submit(made)
    made.on_step(0, output(S, 7), S)
    if tokens > 1:
        made.on_step(0, output(2 * S, *range(tokens - 1), reason=reason), 2 * S)
    made.on_finished("r", reason, 2 * S)
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds")
    assert [bool(sum(samples(made, f"{name}_count").values())) for name in names] == [bool(one) for one in seen]


def test_an_abort_with_the_first_tokens_has_no_time_to_first_token() -> None:
    made = metrics()
    submit(made)
    made.on_step(0, output(S, 7, reason=FinishReason.ABORT), S)
    assert samples(made, "time_to_first_token_seconds_count") == {}


def test_requests_with_a_grammar_are_counted_at_their_end() -> None:
    made = metrics()
    for grammar in ({}, {"grammar": "true"}):
        made.on_submitted(0, [EngineRequest("r", (1,), SequenceSource(()), 9, arrival_ns=0, tags=grammar)])
        made.on_step(0, output(S, 7), S)
        made.on_finished("r", FinishReason.STOP, S)
    assert value(made, "num_so_requests_total", TOKENIZER) == 1


def test_evicted_tokens_add_up_with_the_reports() -> None:
    made = metrics()
    for tokens in (12, 0, 4):
        made.on_step(0, report(evicted_tokens=tokens), 0)
    assert value(made, "evicted_tokens_total", SCHEDULER) == 16


def test_retracted_tokens_move_with_the_report() -> None:
    made = metrics()
    submit(made)
    retracted = Transition(S, "r", Event.PREEMPT, State.DECODE, State.PREEMPTED, {"output_tokens": 5})
    made.on_step(0, StepOutput(S, [], [retracted]), S)
    assert value(made, "num_retracted_output_tokens_total", SCHEDULER) == 0
    made.on_step(0, report(num_unique_running_routing_keys=2), 2 * S)
    made.on_step(0, report(), 3 * S)
    assert value(made, "num_retracted_input_tokens_total", SCHEDULER) == 3
    assert value(made, "num_retracted_output_tokens_total", SCHEDULER) == 5
    assert value(made, "num_unique_running_routing_keys", SCHEDULER) == 2


def test_token_histograms() -> None:
    made = metrics()
    submit(made)
    made.on_step(0, output(S, 7, 8, cached=2), S)
    made.on_finished("r", FinishReason.STOP, S)
    sums = {
        name: value(made, f"{name}_tokens_histogram_sum", TOKENIZER) for name in ("prompt", "uncached_prompt", "generation")
    }
    assert sums == {"prompt": 3, "uncached_prompt": 1, "generation": 2}
    bounds = [float(dict(labels)["le"]) for labels in samples(made, "prompt_tokens_histogram_bucket")]
    assert bounds[:8] == [100, 300, 500, 700, 1000, 1500, 2000, 3000]
    assert bounds[14:] == [
        *(10_000, 12_500, 15_000, 17_500, 20_000, 22_500, 25_000, 27_500, 30_000, 35_000, 40_000, 60_000, 80_000, 100_000),
        *(200_000, 300_000, 400_000, 600_000, 800_000, 1_000_000, 1_100_000, float("inf")),
    ]


_Q, _P, _D, _I = State.QUEUED, State.PREFILL, State.DECODE, State.INFLIGHT
LIVES: dict[str, list[tuple[int, Event, State, State]]] = {
    "unified": [
        (2, Event.SCHEDULE, _Q, _P),
        (5, Event.FIRST_TOKEN, _P, _D),
        (6, Event.PREEMPT, _D, State.PREEMPTED),
        (8, Event.SCHEDULE, State.PREEMPTED, _P),
        (9, Event.FIRST_TOKEN, _P, _D),
    ],
    "prefill": [
        (1, Event.BOOTSTRAPPED, State.BOOTSTRAPPING, _Q),
        (3, Event.SCHEDULE, _Q, _P),
        (6, Event.HAND_OVER, _P, _I),
        (10, Event.FINISH, _I, State.FINISHED),
    ],
    "decode": [
        (1, Event.FETCH, State.PREALLOC, State.TRANSFERRING),
        (3, Event.FETCHED, State.TRANSFERRING, _Q),
        (6, Event.SCHEDULE, _Q, _P),
        (6, Event.FIRST_TOKEN, _P, _D),
    ],
}
STAGES = {
    "unified": {"prefill_forward": 3},
    "prefill": {"prefill_bootstrap": 1, "prefill_forward": 3, "prefill_transfer_kv_cache": 4},
    "decode": {"decode_bootstrap": 1, "decode_transferred": 2, "decode_waiting": 3, "fake_output": 0},
}
WAITED = {"unified": 2, "prefill": 2, "decode": 3}


@pytest.mark.parametrize("engine_type", LIVES)
def test_stages_and_queue_time_are_observed_once_for_a_request(engine_type: str) -> None:
    made = metrics(engine_type=engine_type)
    submit(made)
    for at_s, event, before, after in LIVES[engine_type]:
        made.on_step(0, StepOutput(at_s * S, [], [Transition(at_s * S, "r", event, before, after)]), at_s * S)
    labels = SCHEDULER | {"engine_type": engine_type}
    assert value(made, "queue_time_seconds_sum", labels) == WAITED[engine_type]
    assert value(made, "queue_time_seconds_count", labels) == 1
    found = {dict(key)["stage"]: seen for key, seen in samples(made, "per_stage_req_latency_seconds_sum").items()}
    assert found == STAGES[engine_type]
    assert set(samples(made, "per_stage_req_latency_seconds_count").values()) == {1}


def test_a_prefill_worker_has_its_queues_under_the_names_of_its_release() -> None:
    renamed = {"num_prefill_inflight_queue_reqs": "num_prefill_infight_queue_reqs"}
    made = metrics(engine_type="prefill", renamed=renamed)
    made.on_step(0, report(num_prefill_inflight_queue_reqs=4), 0)
    labels = SCHEDULER | {"engine_type": "prefill"}
    assert value(made, "num_prefill_infight_queue_reqs", labels) == 4
    assert samples(made, "num_prefill_inflight_queue_reqs") == {}
    made.count(0, "num_transfer_failed_reqs", 2)
    assert value(made, "num_transfer_failed_reqs_total", labels) == 2
    assert samples(metrics(), "num_transfer_failed_reqs_total") == {}


def test_routing_keys_at_work_count_once_each() -> None:
    made = metrics()
    seen = []
    for more, key in ((1, "a"), (1, "a"), (1, None), (1, "b"), (-1, "a"), (-1, "a"), (-1, None), (-1, "b")):
        (made.on_http_begin if more > 0 else made.on_http_end)("/generate", "POST", key)
        seen.append(value(made, "routing_keys_active", {}))
    assert seen == [1, 1, 1, 2, 2, 1, 1, 0]


def test_http_counts_requests_as_they_come_and_statuses_as_heads_leave() -> None:
    made = metrics()
    labels = {"endpoint": "/generate", "method": "POST"}
    made.on_http_begin("/generate", "POST")
    assert value(made, "http_requests_active", labels) == 1
    made.on_http_status("/generate", "POST", 503)
    made.on_http_end("/generate", "POST")
    assert value(made, "http_requests_active", labels) == 0
    assert value(made, "http_responses_total", labels | {"status_code": "503"}) == 1
    assert value(made, "http_requests_total", labels) == 1


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("time_to_first_token_seconds", ["0.1", "0.2", "0.4", "0.6", "0.8", "1.0", "2.0", "4.0", "6.0", "8.0", "10.0", "20.0"]),
        (
            "inter_token_latency_seconds",
            ["0.002", "0.004", "0.006", "0.008", "0.01", "0.015", "0.02", "0.025", "0.03"],
        ),
        ("queue_time_seconds", ["0.0", "0.001", "0.005", "0.01", "0.05", "0.1", "0.2", "0.5", "1.0", "2.0", "3.0", "4.0"]),
    ],
)
def test_buckets_are_those_of_the_appendix(name: str, bounds: list[str]) -> None:
    made = metrics()
    submit(made)
    made.on_step(0, StepOutput(0, [], [Transition(0, "r", Event.SCHEDULE, State.QUEUED, State.PREFILL)]), 0)
    made.on_step(0, output(S, 7), S)
    made.on_step(0, output(2 * S, 7), 2 * S)
    found = [dict(labels)["le"] for labels in samples(made, f"{name}_bucket")]
    assert found[: len(bounds)] == bounds
