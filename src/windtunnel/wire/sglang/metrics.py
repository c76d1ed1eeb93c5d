"""The metrics of an SGLang server: one table, and the folds that feed it (SGLang reference §6, Appendix A).

Three parts of the real server write them, each with labels of its own:

* The scheduler: gauges and token counters move only with a report of the engine (`StepStats`; `core.sglang.reports` says when),
  so they stand still between two reports, whatever happens. Queue times come with the requests.
* The tokenizer manager: latencies with each output, counts when a request ends, aborts when they are sent.
* The HTTP layer: `SglangHttp` counts requests as they come and responses as they begin.

Values of labels, and who observes what and when, are checked against the wheel of SGLang 0.5.23
(`observability/metrics_collector.py`, `req_time_stats.py`, `managers/tokenizer_manager.py`). Each stage is observed once for a
request, and so is its queue time: not again after a retraction. Stages in which no time passes here (`request_process`,
`decode_prepare`) and those of single chunks are absent. `evicted_tokens_total` moves with a report, in SGLang with each
eviction; its labels are those that the reference gives, where the wheel has `cache_type`, `tp_rank`, `pp_rank`, `dp_rank`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.core.lifecycle import Event, Transition
from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import S
from windtunnel.wire.metrics import Family, Kind, MetricSpec, Store, Value

PREFIX = "sglang:"
TOKENIZER_LABELS = ("model_name", "engine_type")
SCHEDULER_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")

# fmt: off
QUEUE_BUCKETS = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500,
    600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000,
)
STAGE_BUCKETS = tuple(0.001 * 1.62**power for power in range(30))
TTFT_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
TOKEN_BUCKETS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)
E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
_KV_RELEASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)
_SPEED_BUCKETS = (0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)
_LATENCY_MS_BUCKETS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
_TOTAL_MB_BUCKETS = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
_COUNT_BUCKETS = (
    100, 300, 500, 700, 1000, 1500, *range(2000, 10_001, 1000), *range(12_500, 30_001, 2500), 35_000, 40_000, 60_000, 80_000,
    100_000, 200_000, 300_000, 400_000, 600_000, 800_000, 1_000_000, 1_100_000,
)
_LOADS_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
# fmt: on


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of the table. `labels` come after the common ones; `start`: label values that exist from the start."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    start: tuple[str, ...] = ()


def _gauge(name: str, text: str) -> Row:
    return Row(name, "gauge", text)


def _counter(name: str, text: str, label: str | None = None, start: tuple[str, ...] = ()) -> Row:
    """`name` is without `_total`, which the text form adds."""
    return Row(name, "counter", text, () if label is None else (label,), start=start)


_ABSENT = tuple(
    _gauge(name, f"Always 0: there is no {what} here")
    for what, names in {
        "sliding-window pool": (
            "swa_token_usage", "swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens", "prealloc_swa_token_usage",
        ),
        "state-space pool": ("mamba_usage", "mamba_available_tokens", "mamba_evictable_tokens", "mamba_used_tokens"),
        "speculative decoding": (
            "spec_accept_length", "spec_accept_rate", "spec_cap_length", "spec_block_accept_length", "spec_num_steps",
            "spec_num_draft_tokens",
        ),
        "CUDA graph": ("is_cuda_graph",),
        "host receive queue": ("num_decode_host_receive_queue_reqs",),
    }.items()
    for name in names
)  # fmt: skip
"""Gauges that every report of a real server writes, and that stay at zero without what they measure."""

SCHEDULER_ROWS: tuple[Row, ...] = (
    _gauge("num_running_reqs", "Running requests, as the last report said"),
    _gauge("num_queue_reqs", "Requests in the waiting queue"),
    _gauge("num_grammar_queue_reqs", "Requests that wait for their grammar"),
    _gauge("num_paused_reqs", "Always 0: nothing sets it in SGLang 0.5.23"),
    _gauge("num_retracted_reqs", "Requests that the last retraction took since the batch reported before"),
    _gauge("token_usage", "Share of the fullest KV pool in use, two decimals"),
    _gauge("full_token_usage", "Share of the KV pool in use"),
    _gauge("num_used_tokens", "Tokens in use in the KV pool"),
    _gauge("kv_available_tokens", "Free tokens of the KV pool"),
    _gauge("kv_evictable_tokens", "Cached tokens that nobody uses"),
    _gauge("kv_used_tokens", "Tokens of the KV pool that requests hold"),
    _gauge("cache_hit_rate", "Cached share of the prompt tokens of the last prefill report"),
    _gauge("gen_throughput", "Generated tokens per second since the report before"),
    _gauge("utilization", "-1 on a prefill worker, else always 0: nothing sets it in SGLang 0.5.23"),
    _gauge("new_token_ratio", "Share of the possible output that admission reserves"),
    _gauge("decode_sum_seq_lens", "Tokens of all running sequences"),
    _gauge("num_unique_running_routing_keys", "Routing keys of the running requests"),
    _gauge("max_total_num_tokens", "Size of the KV pool in tokens"),
    _gauge("page_size", "Tokens in a page"),
    _gauge("num_pages", "Pages of the KV pool"),
    _gauge("context_len", "Context window in tokens"),
    _gauge("pending_prealloc_token_usage", "Share of the KV pool that requests wait for"),
    _gauge("prealloc_full_token_usage", "Share of the KV pool held by requests that do not run yet"),
    *_ABSENT,
    _counter("num_retracted_requests", "Retractions"),
    _counter("num_retracted_input_tokens", "Prompt tokens of retracted requests"),
    _counter("num_retracted_output_tokens", "Tokens that retracted requests had generated"),
    _counter("evicted_tokens", "Cached tokens whose pages were taken for others"),
    _counter("realtime_tokens", "Tokens by what was done with them", "mode", ("prefill_compute", "prefill_cache", "decode")),
    Row("queue_time_seconds", "histogram", "From queued to scheduled", buckets=QUEUE_BUCKETS),
    Row("per_stage_req_latency_seconds", "histogram", "Time in each stage of a request", ("stage",), STAGE_BUCKETS),
)

DISAGG_GAUGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "prefill": (
        ("num_prefill_bootstrap_queue_reqs", "Bootstrap queue"),
        ("num_prefill_inflight_queue_reqs", "Requests whose KV is being sent"),
    ),
    "decode": (
        ("num_decode_prealloc_queue_reqs", "Prealloc queue, pending ones included"),
        ("num_decode_transfer_queue_reqs", "Requests whose KV is being received"),
        ("num_decode_deferred_kv_release_reqs", "Failed requests whose pages are still held"),
    ),
}

DISAGG_ROWS: tuple[Row, ...] = (
    _counter("num_bootstrap_failed_reqs", "Failures in the bootstrap queue or handshake"),
    _counter("num_transfer_failed_reqs", "Failures in the inflight or transfer queue, aborts included"),
    _counter("num_prefill_retries", "Optimistic prefills that were tried again"),
    Row("kv_transfer_speed_gb_s", "histogram", "Speed of each transfer", buckets=_SPEED_BUCKETS),
    Row("kv_transfer_latency_ms", "histogram", "From the first enqueue to success", buckets=_LATENCY_MS_BUCKETS),
    Row("kv_transfer_bootstrap_ms", "histogram", "Time in the bootstrap queue", buckets=_LATENCY_MS_BUCKETS[:-1]),
    Row("kv_transfer_alloc_ms", "histogram", "Time until the decode had pages", buckets=_LATENCY_MS_BUCKETS[:-1]),
    Row("kv_transfer_total_mb", "histogram", "Size of each transfer", buckets=_TOTAL_MB_BUCKETS),
    Row("decode_deferred_kv_release_seconds", "histogram", "How long pages were held", buckets=_KV_RELEASE_BUCKETS),
    _counter("decode_deferred_kv_release", "Ends of such holds", "outcome", ("drained", "timeout", "error")),
)

TOKENIZER_ROWS: tuple[Row, ...] = (
    _counter("prompt_tokens", "Prompt tokens of finished requests", "is_streaming"),
    _counter("generation_tokens", "Generated tokens of finished requests", "is_streaming"),
    _counter("cached_tokens", "Prompt tokens that came from a cache", "cache_source", ("device",)),
    _counter("num_requests", "Finished requests", "is_streaming"),
    _counter("num_so_requests", "Finished requests with a grammar"),
    _counter("num_aborted_requests", "Aborts sent to the scheduler"),
    Row("time_to_first_token_seconds", "histogram", "From arrival to the first output", ("is_streaming",), TTFT_BUCKETS),
    Row("inter_token_latency_seconds", "histogram", "From one output of a request to its next", (), TOKEN_BUCKETS),
    Row("request_time_per_output_token_seconds", "histogram", "Mean time per later token", ("is_streaming",), TOKEN_BUCKETS),
    Row("e2e_request_latency_seconds", "histogram", "From arrival to the end", ("is_streaming",), E2E_BUCKETS),
    Row("get_loads_duration_seconds", "histogram", "Duration of /v1/loads", (), _LOADS_BUCKETS),
    Row("prompt_tokens_histogram", "histogram", "Prompt tokens of a request", (), _COUNT_BUCKETS),
    Row("uncached_prompt_tokens_histogram", "histogram", "Those that came from no cache", (), _COUNT_BUCKETS),
    Row("generation_tokens_histogram", "histogram", "Generated tokens of a request", (), _COUNT_BUCKETS),
)

_STAGES: Mapping[str, Mapping[Event, str]] = {
    "unified": {Event.FIRST_TOKEN: "prefill_forward"},
    "prefill": {
        Event.BOOTSTRAPPED: "prefill_bootstrap",
        Event.HAND_OVER: "prefill_forward",
        Event.FINISH: "prefill_transfer_kv_cache",
    },
    "decode": {
        Event.FETCH: "decode_bootstrap",
        Event.FETCHED: "decode_transferred",
        Event.SCHEDULE: "decode_waiting",
        Event.FIRST_TOKEN: "fake_output",
    },
}
"""The stage of a request that an event ends, by the type of the engine."""
HTTP_ROWS: tuple[Row, ...] = (
    _counter("http_requests", "Requests by endpoint and method"),
    _counter("http_responses", "Responses by endpoint, status and method"),
    _gauge("http_requests_active", "Requests at work"),
    _gauge("routing_keys_active", "Different x-smg-routing-key of the requests at work"),
)
_HTTP_LABELS = {"http_responses": ("endpoint", "status_code", "method"), "routing_keys_active": ()}


@dataclass(slots=True)
class _Life:
    """The times of one live request. Owned by the metrics."""

    rank: int
    prompt_tokens: int
    streaming: str
    arrival_ns: int
    stage_ns: int
    grammar: bool = False
    stages: set[str] = field(default_factory=set)
    """Those already observed."""
    first_ns: int | None = None
    last_ns: int = 0
    generated: int = 0
    cached: int = 0


class SglangMetrics:
    """Fed by `serve`; see `serve.telemetry.Metrics`. Owned by one thread."""

    def __init__(
        self,
        model_name: str,
        ranks: int,
        clock_s: Callable[[], float],
        *,
        engine_type: str = "unified",
        tp_ranks: Sequence[int] = (0,),
        constants: Mapping[str, float] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """`constants`: gauges that never move. `renamed`: gauge names of an older release, by their present ones."""
        self.store = Store(clock_s)
        self._tokenizer = (model_name, engine_type)
        self._dp = ("dp_rank",) if ranks > 1 else ()
        self._scheduler = [
            [self._scheduler_labels(model_name, engine_type, tp_rank, rank) for tp_rank in tp_ranks] for rank in range(ranks)
        ]
        self._families: dict[str, Family[Any]] = {}
        self._names = dict(renamed or {})
        self._live: dict[str, _Life] = {}
        self._reported: list[Mapping[str, float]] = [{} for _ in range(ranks)]
        self._add_scheduler(engine_type)
        self._retracted = [(0, 0)] * ranks
        """(Prompt tokens, generated tokens) of retracted requests since the last report."""
        self._decodes = engine_type != "prefill"
        """A prefill worker observes no time of a token."""
        self._stages = _STAGES.get(engine_type, {})
        for row in TOKENIZER_ROWS:
            self._add(row, (*TOKENIZER_LABELS, *row.labels), [self._tokenizer])
        self._http = {row.name: self._add(row, _HTTP_LABELS.get(row.name, ("endpoint", "method")), []) for row in HTTP_ROWS}
        self._http["routing_keys_active"].child()
        self._keys: Counter[str] = Counter()
        """Requests at work by their routing key."""
        for rank in range(ranks):
            self.set_gauges(rank, constants or {})

    def _scheduler_labels(self, model_name: str, engine_type: str, tp_rank: int, rank: int) -> tuple[str, ...]:
        return (model_name, engine_type, str(tp_rank), "0", "0", *([str(rank)] if self._dp else ()))

    def _add_scheduler(self, engine_type: str) -> None:
        children = [labels for rank in self._scheduler for labels in rank]
        rows = list(SCHEDULER_ROWS)
        rows += [_gauge(self._names.get(name, name), text) for named in DISAGG_GAUGES.values() for name, text in named]
        if engine_type != "unified":
            rows += DISAGG_ROWS
        for row in rows:
            self._add(row, (*SCHEDULER_LABELS, *self._dp, *row.labels), children)

    def _add(self, row: Row, labels: tuple[str, ...], children: Sequence[tuple[str, ...]]) -> Family[Any]:
        """Add a family. Children without labels of their own exist from the start, so that a dashboard finds a zero."""
        spec = MetricSpec(PREFIX + row.name, row.kind, row.help, labels, row.buckets)
        family: Family[Any] = self.store.histograms(spec) if row.kind == "histogram" else self.store.values(spec)
        for common in children:
            for value in row.start or ([] if row.labels else [None]):
                family.child(*common, *([] if value is None else [value]))
        self._families[row.name] = family
        return family

    # The scheduler

    def set_gauges(self, rank: int, values: Mapping[str, float]) -> None:
        """Gauges by stem; a stem that the table does not know is left out."""
        for name, value in values.items():
            family = self._families.get(self._names.get(name, name))
            if family is not None and family.spec.kind == "gauge":
                for labels in self._scheduler[rank]:
                    family.child(*labels).value = float(value)

    def count(self, rank: int, name: str, amount: float, *labels: str) -> None:
        """Add to a counter of the scheduler, on all its tensor-parallel ranks."""
        for common in self._scheduler[rank]:
            self._families[name].child(*common, *labels).inc(amount)

    def observe(self, rank: int, name: str, value: float, *labels: str) -> None:
        """One observation of a histogram of the scheduler."""
        for common in self._scheduler[rank]:
            self._families[name].child(*common, *labels).observe(value)

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        for transition in step.transitions:
            life = self._live.get(transition.request_id)
            if life is not None:
                self._fold(life, transition)
        if step.stats is not None:
            self._report(rank, step.stats)
        for output in step.outputs:
            life = self._live.get(output.request_id)
            if life is not None and output.token_ids:
                self._output(life, output, step.at_ns)

    def reported(self, rank: int) -> Mapping[str, float]:
        """The gauges of the last report, by stem."""
        return self._reported[rank]

    def _report(self, rank: int, stats: StepStats) -> None:
        told = {"num_running_reqs": stats.running, "num_queue_reqs": stats.waiting}
        self._reported[rank] = {**told, **stats.extra}
        self.set_gauges(rank, self._reported[rank])
        moved = {"prefill_compute": stats.prefill_tokens, "prefill_cache": stats.prefix_hits, "decode": stats.decode_tokens}
        for mode, tokens in moved.items():
            self.count(rank, "realtime_tokens", tokens, mode)
        self.count(rank, "evicted_tokens", stats.extra.get("evicted_tokens", 0))
        self.count(rank, "num_retracted_requests", stats.preemptions)
        for kind, tokens in zip(("input", "output"), self._retracted[rank], strict=True):
            self.count(rank, f"num_retracted_{kind}_tokens", tokens)
        self._retracted[rank] = (0, 0)

    def _fold(self, life: _Life, transition: Transition) -> None:
        """Queue time and the stages of a prefill."""
        spent_s = (transition.at_ns - life.stage_ns) / S
        if transition.event is Event.SCHEDULE and "queue" not in life.stages:
            life.stages.add("queue")
            self.observe(life.rank, "queue_time_seconds", spent_s)
        stage = self._stages.get(transition.event)
        if stage is not None and stage not in life.stages:
            life.stages.add(stage)
            self.observe(life.rank, "per_stage_req_latency_seconds", spent_s, stage)
        if transition.event is Event.PREEMPT:
            prompt, made = self._retracted[life.rank]
            made += int((transition.detail or {}).get("output_tokens", 0))
            self._retracted[life.rank] = (prompt + life.prompt_tokens, made)
        life.stage_ns = transition.at_ns

    # The tokenizer manager

    def on_submitted(self, rank: int, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            tags, tokens, at_ns = request.tags, len(request.prompt_token_ids), request.arrival_ns
            life = _Life(rank, tokens, tags.get("stream", "false"), at_ns, at_ns, grammar=tags.get("grammar") == "true")
            self._live[request.request_id] = life

    def on_rejected(self, reason: str) -> None:
        """SGLang has no counter for refusals."""

    def _output(self, life: _Life, output: TokenOutput, at_ns: int) -> None:
        count = len(output.token_ids)
        if life.first_ns is None:
            life.first_ns, life.cached = at_ns, output.cached_tokens
            if self._decodes and output.finish_reason is not FinishReason.ABORT:
                self._tokenizer_child("time_to_first_token_seconds", life.streaming).observe((at_ns - life.arrival_ns) / S)
        elif self._decodes:
            self._tokenizer_child("inter_token_latency_seconds").observe((at_ns - life.last_ns) / S / count, count)
        life.last_ns = at_ns
        life.generated += count

    def on_finished(self, request_id: str, reason: FinishReason, now_ns: int) -> None:
        """An abort that the waiting queue echoes is no end of a request for these (§5): there was no output."""
        life = self._live.pop(request_id, None)
        if life is not None and (life.generated or reason is not FinishReason.ABORT):
            self._count_end(life, now_ns)
            if life.first_ns is not None and life.generated > 1 and reason is not FinishReason.ABORT and self._decodes:
                mean_s = (now_ns - life.first_ns) / S / (life.generated - 1)
                self._tokenizer_child("request_time_per_output_token_seconds", life.streaming).observe(mean_s)

    def _count_end(self, life: _Life, now_ns: int) -> None:
        took_s = (now_ns - life.arrival_ns) / S
        self._tokenizer_child("prompt_tokens", life.streaming).inc(life.prompt_tokens)
        self._tokenizer_child("generation_tokens", life.streaming).inc(life.generated)
        self._tokenizer_child("cached_tokens", "device").inc(life.cached)
        self._tokenizer_child("num_requests", life.streaming).inc()
        self._tokenizer_child("e2e_request_latency_seconds", life.streaming).observe(took_s)
        if life.grammar:
            self._tokenizer_child("num_so_requests").inc()
        self._tokenizer_child("prompt_tokens_histogram").observe(life.prompt_tokens)
        self._tokenizer_child("uncached_prompt_tokens_histogram").observe(life.prompt_tokens - life.cached)
        self._tokenizer_child("generation_tokens_histogram").observe(life.generated)

    def on_dropped(self, request_ids: Iterable[str]) -> None:
        """The client has gone: its requests are aborted. Their state stays until the scheduler confirms (P41), so what they
        generated is counted as for any other end.
        """
        lives = [life for request_id in request_ids if (life := self._live.pop(request_id, None)) is not None]
        self.on_aborts(len(lives))
        for life in lives:
            if life.generated:
                self._count_end(life, life.last_ns)

    def on_aborts(self, count: int) -> None:
        self._tokenizer_child("num_aborted_requests").inc(count)

    def on_loads(self, duration_s: float) -> None:
        self._tokenizer_child("get_loads_duration_seconds").observe(duration_s)

    def request_metrics_ms(self, request_id: str) -> None:
        """SGLang's timings are in `meta_info`."""

    def _tokenizer_child(self, name: str, *labels: str) -> Any:
        return self._families[name].child(*self._tokenizer, *labels)

    # The HTTP layer

    def on_http_begin(self, endpoint: str, method: str, routing_key: str | None = None) -> None:
        self._http["http_requests"].child(endpoint, method).inc()
        self._active(endpoint, method).inc()
        self._count_key(routing_key, 1)

    def on_http_status(self, endpoint: str, method: str, status: int) -> None:
        """The head of a response: a stream that later carries an error is a 200."""
        self._http["http_responses"].child(endpoint, str(status), method).inc()

    def on_http_end(self, endpoint: str, method: str, routing_key: str | None = None) -> None:
        self._active(endpoint, method).inc(-1)
        self._count_key(routing_key, -1)

    def _count_key(self, key: str | None, more: int) -> None:
        if key is None:
            return
        self._keys[key] += more
        if not self._keys[key]:
            del self._keys[key]
        self._http["routing_keys_active"].child().value = float(len(self._keys))

    def _active(self, endpoint: str, method: str) -> Value:
        child: Value = self._http["http_requests_active"].child(endpoint, method)
        return child
