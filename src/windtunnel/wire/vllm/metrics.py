"""The metrics of a vLLM server: one table of series, and the folds that feed them (vLLM reference §4).

`VllmMetrics` reads what the engine reports (`on_step`) and what the front end does (`on_submitted`, `on_finished`,
`on_dropped`, `on_rejected`, `on_http`). What moves follows from three rules of the real server:

* Gauges and prefix-cache counters move only with a step that delivers statistics.
* Token counters, TTFT and inter-token latencies move with each output that reaches the front end. So do preemptions: they
  travel with the next output of their request, and one that never speaks again is not counted (recorded on vLLM 0.32).
* Finish-time histograms and `request_success` move only when the front end sees a final output. A client that disconnects
  and an abort by id remove the state first, so nothing is recorded (§3.7, §3.8).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from windtunnel.core.lifecycle import Event, Transition
from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.request import EngineRequest, MediaItem
from windtunnel.core.units import MS, S
from windtunnel.core.vllm.connector.config import Mode
from windtunnel.wire.metrics import Family, Histogram, MetricSpec, Store, Value
from windtunnel.wire.vllm.kv_metrics import ConnectorMetrics

_MODEL = ("model_name", "engine")
_TOKEN_FAMILIES = {
    "request_prompt_tokens": "Prompt tokens of each finished request",
    "request_generation_tokens": "Generated tokens of each finished request",
    "request_max_num_generation_tokens": "Longest choice of each finished prompt, in generated tokens",
    "request_params_max_tokens": "max_tokens of each finished request",
    "request_prefill_kv_computed_tokens": "Prompt tokens of each finished request that the prefix cache did not supply",
}
_STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
# fmt: off
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
_TOKEN_TIME_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_HIGHR_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
# fmt: on

MEDIA_KEPT = 4096
"""Media that the front end remembers. vLLM's processor cache has a size in bytes (4 GiB); there are no bytes here."""
SLEEP_OPERATIONS = ("sleep", "release_kv_cache_memory", "wake")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
UNRECORDED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Handlers that the HTTP families leave out (§4.5)."""

_ENUMS: Mapping[str, tuple[str, ...]] = {
    "vllm:num_requests_waiting_by_reason": ("capacity", "deferred"),
    "vllm:engine_sleep_state": SLEEP_STATES,
    "vllm:prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "vllm:prompt_tokens_cached_by_source": ("device", "host", "p2p", "disk", "external_unspecified"),
    "vllm:request_success": tuple(reason.value for reason in FinishReason),
}
"""Values of the last label that exist from the start, for each engine."""

TOOL_MODES = ("streaming", "non_streaming")
TOOL_OUTCOMES = ("tool_call", "no_tool_call")
TOOL_REQUEST_TYPES = ("chat_completions", "responses", "other")


def token_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … not above `limit`, which is `max_model_len`."""
    decades = (base * 10**power for power in range(len(str(limit))) for base in (1, 2, 5))
    return tuple(bound for bound in decades if bound <= limit)


def _counter(name: str, help_text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"vllm:{name}", "counter", help_text, (*_MODEL, *labels))


def _gauge(name: str, help_text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"vllm:{name}", "gauge", help_text, (*_MODEL, *labels))


def _histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(f"vllm:{name}", "histogram", help_text, _MODEL, buckets)


def engine_specs(max_model_len: int) -> tuple[MetricSpec, ...]:
    """The series of each engine, in the order of a recorded server (vLLM 0.32)."""
    tokens = {name: _histogram(name, text, token_buckets(max_model_len)) for name, text in _TOKEN_FAMILIES.items()}
    return (
        _counter("estimated_flops_per_gpu", "Estimated floating point operations of each GPU; always 0 here"),
        _counter("estimated_read_bytes_per_gpu", "Estimated bytes read from the memory of each GPU; always 0 here"),
        _counter("estimated_write_bytes_per_gpu", "Estimated bytes written to the memory of each GPU; always 0 here"),
        _gauge("num_requests_running", "Requests in the running list after the last step"),
        _gauge("num_requests_waiting", "Requests that wait, deferred ones included"),
        _gauge("num_requests_waiting_by_reason", "Waiting requests: for capacity, or deferred (grammar, KV, LoRA)", "reason"),
        _gauge("engine_sleep_state", "1 for the state the engine is in", "sleep_state"),
        _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
        _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
        _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
        _counter("external_prefix_cache_queries", "Prompt tokens looked up through the KV connector"),
        _counter("external_prefix_cache_hits", "Prompt tokens found through the KV connector"),
        _counter("mm_cache_queries", "Items looked up in the multi-modal cache"),
        _counter("mm_cache_hits", "Items found in the multi-modal cache"),
        _counter("num_preemptions", "Preemptions, counted with the next output of the preempted request"),
        _counter("prompt_tokens", "Prompt tokens of requests that gave their first output"),
        _counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"),
        _counter("prompt_tokens_cached", "Prompt tokens whose KV was cached, here or elsewhere"),
        _counter("prompt_tokens_cached_by_source", "Cached prompt tokens by cache tier, counted at admission", "source"),
        _counter("generation_tokens", "Generated tokens"),
        _counter("request_success", "Requests that ended with a final output, by reason", "finished_reason"),
        MetricSpec("vllm:admission_rejections", "counter", "Requests refused at a queue limit", ("model_name", "reason")),
        tokens["request_prompt_tokens"],
        tokens["request_generation_tokens"],
        _histogram(
            "iteration_tokens_total",
            "Tokens of each step: prompt tokens of finished prefills, and generated ones",
            _STEP_BUCKETS,
        ),
        tokens["request_max_num_generation_tokens"],
        _histogram("request_params_n", "n of each finished prompt", _N_BUCKETS),
        tokens["request_params_max_tokens"],
        _histogram("time_to_first_token_seconds", "From arrival to the first output at the front end", _TTFT_BUCKETS),
        _histogram("inter_token_latency_seconds", "From one output of a request to its next", _TOKEN_TIME_BUCKETS),
        _histogram("request_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_TIME_BUCKETS),
        _histogram("e2e_request_latency_seconds", "From arrival to the final output at the front end", _REQUEST_BUCKETS),
        _histogram("request_queue_time_seconds", "From queued to first scheduled", _REQUEST_BUCKETS),
        _histogram("request_inference_time_seconds", "From first scheduled to the last token", _REQUEST_BUCKETS),
        _histogram("request_prefill_time_seconds", "From first scheduled to the first token", _REQUEST_BUCKETS),
        _histogram("request_decode_time_seconds", "From the first token to the last", _REQUEST_BUCKETS),
        _histogram("request_num_preemptions", "Preemptions of each finished request", _PREEMPTION_BUCKETS),
        tokens["request_prefill_kv_computed_tokens"],
    )


SLEEP_TIME = MetricSpec(
    "vllm:sleep_mode_operation_duration_seconds",
    "histogram",
    "Duration of each sleep-mode operation",
    ("operation",),
    (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600),
)
SLEEP_IN_FLIGHT = MetricSpec(
    "vllm:sleep_mode_operations_in_flight", "gauge", "Sleep-mode operations that have not returned", ("operation",)
)
LORA_SPEC = MetricSpec(
    "vllm:lora_requests_info",
    "gauge",
    "Time of the last step with these adapters",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
)
HTTP_REQUESTS = MetricSpec(
    "http_requests", "counter", "Requests by handler, method and class of status", ("handler", "method", "status")
)
HTTP_REQUEST_SIZE = MetricSpec("http_request_size_bytes", "summary", "Content-Length of requests, 0 without one", ("handler",))
HTTP_RESPONSE_SIZE = MetricSpec(
    "http_response_size_bytes", "summary", "Content-Length of responses, 0 without one", ("handler",)
)
HTTP_HIGHR = MetricSpec("http_request_duration_highr_seconds", "histogram", "Duration of all requests", (), _HIGHR_BUCKETS)
HTTP_DURATION = MetricSpec(
    "http_request_duration_seconds",
    "histogram",
    "Duration of requests by handler and method",
    ("handler", "method"),
    (0.1, 0.5, 1),
)
TOOL_CALLS = MetricSpec(
    "vllm:tool_call_parser_invocations",
    "counter",
    "Uses of a tool-call parser: one for each choice, or for each delta of a stream",
    ("model_name", "mode", "outcome", "request_type"),
)

_CACHE_CONFIG_DEFAULTS: Mapping[str, str] = {
    "_block_size_resolved": "True", "block_size": "16", "cache_dtype": "auto", "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": "16", "enable_mamba_shared_prefix_checkpoint": "False", "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92", "hash_block_size": "None", "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None", "kv_cache_max_concurrency": "None",
    "kv_cache_memory_bytes": "None", "kv_cache_size_tokens": "None", "kv_offloading_backend": "native",
    "kv_offloading_size": "None", "kv_sharing_fast_prefill": "False", "mamba_block_size": "None", "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none", "mamba_page_size_padded": "None", "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None", "num_gpu_blocks": "None", "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0", "prefix_caching_hash_algo": "sha256", "prefix_match_unit": "None",
    "replayssm_buffer_len": "16", "skip_page_size_padded": "None", "sliding_window": "None", "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False", "use_replayssm": "False", "user_specified_block_size": "False",
}  # fmt: skip
"""The label set of `vllm:cache_config_info` as vLLM 0.32 shows it."""


def cache_config_labels(*, block_size: int, num_gpu_blocks: int, max_model_len: int, **others: object) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`; `others` are further fields of the cache configuration, by their vLLM names.

    Raises ValueError for a name that vLLM does not have.
    """
    unknown = others.keys() - _CACHE_CONFIG_DEFAULTS.keys()
    if unknown:
        raise ValueError(f"vllm:cache_config_info has no label {', '.join(sorted(unknown))}")
    size_tokens = block_size * num_gpu_blocks
    derived = {
        "block_size": block_size,
        "effective_attention_block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "kv_cache_size_tokens": size_tokens,
        "kv_cache_max_concurrency": size_tokens / max_model_len,
    }
    return {**_CACHE_CONFIG_DEFAULTS, **{name: str(value) for name, value in {**derived, **others}.items()}}


@dataclass(slots=True)
class PromptGroup:
    """The choices of one prompt: `request_params_n` and the longest generation count once for all. Owned by its timings."""

    n: int
    open: int
    longest: int = 0


@dataclass(slots=True)
class RequestTimings:
    """What one live sequence has shown so far; owned by `VllmMetrics`. Engine times, except `arrival_ns` (front end)."""

    rank: int
    prompt_tokens: int
    max_tokens: int
    arrival_ns: int
    group: PromptGroup
    queued_ns: int
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    """Of the cached ones: from a host or disk tier, or through a KV connector."""
    generated: int = 0
    preemptions: int = 0
    unreported_preemptions: int = 0

    def fold(self, transition: Transition) -> None:
        """Take over what this change of state says about time. A repeated SCHEDULE (after a preemption) changes nothing."""
        match transition.event:
            case Event.SUBMIT | Event.BOOTSTRAPPED:
                self.queued_ns = transition.at_ns
            case Event.SCHEDULE if self.scheduled_ns is None:
                self.scheduled_ns = transition.at_ns
                detail = transition.detail or {}
                self.external_tokens = sum(int(detail.get(f"{source}_tokens", 0)) for source in ("host", "disk", "external"))
            case Event.PREEMPT:
                self.preemptions += 1
                self.unreported_preemptions += 1

    def finish_times_ns(self, now_ns: int) -> dict[str, int | float]:
        """Nanoseconds for each finish-time histogram. A stage that was never reached took no time."""
        scheduled = self.scheduled_ns if self.scheduled_ns is not None else self.queued_ns
        first = self.first_token_ns if self.first_token_ns is not None else scheduled
        last = self.last_token_ns if self.first_token_ns is not None else scheduled
        return {
            "e2e_request_latency_seconds": now_ns - self.arrival_ns,
            "request_queue_time_seconds": scheduled - self.queued_ns,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_inference_time_seconds": last - scheduled,
            "request_time_per_output_token_seconds": (last - first) / (self.generated - 1) if self.generated > 1 else 0,
        }

    def request_metrics_ms(self) -> dict[str, float | None]:
        """The `metrics` member of an answer (`--enable-per-request-metrics`): TTFT counts from scheduling (reference §2.4)."""
        scheduled = self.scheduled_ns if self.scheduled_ns is not None else self.queued_ns
        first = self.first_token_ns if self.first_token_ns is not None else scheduled
        last_ms = self.last_token_ns / MS
        decode_ms = last_ms - first / MS
        intervals = self.generated - 1
        return {
            "time_to_first_token_ms": (first - scheduled) / MS,
            "generation_time_ms": decode_ms,
            "queue_time_ms": (scheduled - self.queued_ns) / MS,
            "mean_itl_ms": decode_ms / intervals if intervals > 0 else None,
            "tokens_per_second": 1000 * self.generated / max(last_ms - scheduled / MS, 1e-6),
            "speculative_decoding": None,
        }


class _EngineChildren:
    """The children of one engine rank, looked up once."""

    def __init__(
        self, model: str, rank: int, values: Mapping[str, Family[Value]], histograms: Mapping[str, Family[Histogram]]
    ) -> None:
        engine = str(rank)
        plain = {name: family for name, family in values.items() if name not in _ENUMS}
        self.value = {name.removeprefix("vllm:"): family.child(model, engine) for name, family in plain.items()}
        self.enum = {
            (name.removeprefix("vllm:"), value): values[name].child(model, engine, value)
            for name, members in _ENUMS.items()
            for value in members
        }
        self.histogram = {name.removeprefix("vllm:"): family.child(model, engine) for name, family in histograms.items()}


class MediaCache:
    """What media the front end has seen lately, and what is to be told of its look-ups. Owned by a `VllmMetrics`."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self.untold: dict[int, tuple[int, int]] = {}
        """Rank → look-ups and hits since the rank's last step."""

    def look_up(self, rank: int, items: Iterable[MediaItem]) -> None:
        queries, hits = self.untold.get(rank, (0, 0))
        for item in items:
            queries += 1
            hits += item.identifier in self._known
            self._known.pop(item.identifier, None)
            self._known[item.identifier] = None
            if len(self._known) > MEDIA_KEPT:
                del self._known[next(iter(self._known))]
        if queries:
            self.untold[rank] = queries, hits

    def clear(self) -> None:
        self._known.clear()


class VllmMetrics:
    """All series of one vLLM server. Single-threaded; owns the timings of every live sequence.

    `clock_s` gives Unix seconds (for `_created` and the LoRA gauge). All other times are the driver's nanoseconds. The LoRA
    gauge exists only with `max_loras`, a connector's series only with a `kv_role`; `kv_mode` says which those are.
    """

    def __init__(
        self,
        model_name: str,
        engine_ranks: Sequence[int],
        max_model_len: int,
        cache_config: Mapping[str, str],
        clock_s: Callable[[], float],
        max_loras: int | None = None,
        kv_role: str | None = None,
        kv_mode: Mode = "pull",
    ) -> None:
        self.store = Store(clock_s)
        self._clock_s = clock_s
        self._model_name = model_name
        self._live: dict[str, RequestTimings] = {}
        self._media = MediaCache()
        self._max_loras = max_loras
        self._rejections, self._engines = self._engine_families(engine_ranks, max_model_len)
        self._connector = None if kv_role is None else ConnectorMetrics(self.store, model_name, engine_ranks, kv_role, kv_mode)
        self._external_source = "host" if kv_role is None else "p2p"
        self._lora = self.store.values(LORA_SPEC) if max_loras is not None else None
        self._add_cache_config(engine_ranks, cache_config)
        self._http_requests = self.store.values(HTTP_REQUESTS)
        self._http_request_size = self.store.summaries(HTTP_REQUEST_SIZE)
        self._http_response_size = self.store.summaries(HTTP_RESPONSE_SIZE)
        self._http_highr = self.store.histograms(HTTP_HIGHR).child()
        self._http_duration = self.store.histograms(HTTP_DURATION)
        self._sleep: tuple[Family[Histogram], Family[Value]] | None = None
        self._tool_calls = self.store.values(TOOL_CALLS)
        for key in product(TOOL_MODES, TOOL_OUTCOMES, TOOL_REQUEST_TYPES):
            self._tool_calls.child(model_name, *key)

    def _engine_families(self, ranks: Sequence[int], max_model_len: int) -> tuple[dict[str, Value], dict[int, _EngineChildren]]:
        values: dict[str, Family[Value]] = {}
        histograms: dict[str, Family[Histogram]] = {}
        for spec in engine_specs(max_model_len):
            if spec.kind == "histogram":
                histograms[spec.name] = self.store.histograms(spec)
            else:
                values[spec.name] = self.store.values(spec)
        rejected = values.pop("vllm:admission_rejections")
        rejections = {reason: rejected.child(self._model_name, reason) for reason in REJECTIONS}
        engines = {rank: _EngineChildren(self._model_name, rank, values, histograms) for rank in ranks}
        for engine in engines.values():
            engine.enum["engine_sleep_state", "awake"].value = 1.0
        return rejections, engines

    def _add_cache_config(self, ranks: Sequence[int], labels: Mapping[str, str]) -> None:
        spec = MetricSpec("vllm:cache_config_info", "gauge", "The cache configuration, in the labels", (*labels, "engine"))
        family = self.store.values(spec)
        for rank in ranks:
            family.child(*labels.values(), str(rank)).value = 1.0

    def on_submitted(self, rank: int, requests: Sequence[EngineRequest]) -> None:
        """These sequences were admitted together by engine `rank`; `arrival_ns` is when the front end got the request."""
        groups: dict[str, PromptGroup] = {}
        for request in requests:
            group = groups.setdefault(request.parent_id or request.request_id, PromptGroup(n=0, open=0))
            if request.media and not group.n:
                self._media.look_up(rank, request.media)
            group.n += 1
            group.open += 1
            self._live[request.request_id] = RequestTimings(
                rank, len(request.prompt_token_ids), request.max_tokens, request.arrival_ns, group, queued_ns=request.arrival_ns
            )

    def on_rejected(self, reason: str) -> None:
        """A request was refused at admission. Only the two queue limits have a series."""
        counter = self._rejections.get(reason)
        if counter is not None:
            counter.inc()

    def on_step(self, rank: int, step: StepOutput, now_ns: int, *, in_runs: int = 0) -> None:
        """One step of engine `rank`, read by the front end at `now_ns`; to be called before `on_finished` for its outputs.

        `in_runs`: tokens of this step that are not among its outputs but come by `on_run`.
        """
        engine = self._engines[rank]
        for transition in step.transitions:
            timings = self._live.get(transition.request_id)
            if timings is not None:
                timings.fold(transition)
        if step.stats is not None:
            self._fold_stats(engine, step.stats)
            if self._media.untold:
                queries, hits = self._media.untold.pop(rank, (0, 0))
                engine.value["mm_cache_queries"].value += queries
                engine.value["mm_cache_hits"].value += hits
            if self._connector is not None:
                self._connector.on_stats(rank, step.stats)
        if step.outputs or in_runs:
            self._fold_outputs(engine, step, now_ns, in_runs)

    def on_transfers(self, rank: int, observations: Iterable[tuple[str, float]]) -> None:
        """What the KV connector of engine `rank` has observed (`KvEngine.take_observations`)."""
        if self._connector is not None:
            self._connector.on_transfers(rank, observations)

    def on_run(self, rank: int, request_id: str, times_ns: Sequence[int]) -> None:
        """Tokens of one sequence after its first, one for each of these times."""
        timings = self._live.get(request_id)
        if timings is None or not times_ns:
            return
        engine = self._engines[rank]
        befores = (timings.last_token_ns, *times_ns[:-1])
        engine.histogram["inter_token_latency_seconds"].observe_many(
            [(at_ns - before_ns) / S for at_ns, before_ns in zip(times_ns, befores, strict=True)]
        )
        timings.last_token_ns = times_ns[-1]
        timings.generated += len(times_ns)
        engine.value["generation_tokens"].value += len(times_ns)
        engine.value["num_preemptions"].value += timings.unreported_preemptions
        timings.unreported_preemptions = 0

    def _fold_stats(self, engine: _EngineChildren, stats: StepStats) -> None:
        value, enum = engine.value, engine.enum
        value["num_requests_running"].value = stats.running
        value["num_requests_waiting"].value = stats.waiting + stats.deferred
        enum["num_requests_waiting_by_reason", "capacity"].value = stats.waiting
        enum["num_requests_waiting_by_reason", "deferred"].value = stats.deferred
        value["kv_cache_usage_perc"].value = stats.kv_usage
        value["prefix_cache_queries"].value += stats.prefix_queries
        value["prefix_cache_hits"].value += stats.prefix_hits
        value["external_prefix_cache_queries"].value += stats.external_queries
        value["external_prefix_cache_hits"].value += stats.external_hits
        enum["prompt_tokens_cached_by_source", self._external_source].value += stats.external_hits - stats.disk_hits
        enum["prompt_tokens_cached_by_source", "disk"].value += stats.disk_hits
        enum["prompt_tokens_cached_by_source", "device"].value += stats.prefix_hits
        if self._lora is not None:
            adapters = ",".join(stats.waiting_loras), ",".join(stats.running_loras)
            self._lora.child(str(self._max_loras), *adapters).value = self._clock_s()

    def _fold_outputs(self, engine: _EngineChildren, step: StepOutput, now_ns: int, in_runs: int) -> None:
        computed = generated = preemptions = 0
        at_ns, live = step.at_ns, self._live
        gaps: dict[int, int] = {}
        """How many sequences waited so long for this output: in lock step nearly all waited alike."""
        for output in step.outputs:
            timings = live.get(output[0])
            if timings is None:
                continue
            if timings.first_token_ns is None:
                computed += self._first_output(engine, timings, output, at_ns, now_ns)
            else:
                gap_ns = at_ns - timings.last_token_ns
                gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
            timings.last_token_ns = at_ns
            tokens = len(output[1])
            timings.generated += tokens
            generated += tokens
            if timings.unreported_preemptions:
                preemptions += timings.unreported_preemptions
                timings.unreported_preemptions = 0
        for gap_ns, times in gaps.items():
            engine.histogram["inter_token_latency_seconds"].observe(gap_ns / S, times)
        engine.histogram["iteration_tokens_total"].observe(computed + generated + in_runs)
        engine.value["generation_tokens"].value += generated
        engine.value["num_preemptions"].value += preemptions

    def _first_output(
        self, engine: _EngineChildren, timings: RequestTimings, output: TokenOutput, at_ns: int, now_ns: int
    ) -> int:
        """Count the prompt; returns how many of its tokens were computed here."""
        timings.first_token_ns = at_ns
        timings.cached_tokens = output.cached_tokens
        computed = timings.prompt_tokens - output.cached_tokens
        engine.histogram["time_to_first_token_seconds"].observe((now_ns - timings.arrival_ns) / S)
        engine.value["prompt_tokens"].value += timings.prompt_tokens
        engine.value["prompt_tokens_cached"].value += output.cached_tokens
        engine.enum["prompt_tokens_by_source", "local_compute"].value += computed
        engine.enum["prompt_tokens_by_source", "local_cache_hit"].value += output.cached_tokens - timings.external_tokens
        engine.enum["prompt_tokens_by_source", "external_kv_transfer"].value += timings.external_tokens
        return computed

    def on_finished(self, request_id: str, reason: FinishReason, now_ns: int) -> None:
        """The front end has handled a final output. Not for disconnects and aborts by id: those are `on_dropped`."""
        timings = self._live.pop(request_id, None)
        if timings is None:
            return
        engine = self._engines[timings.rank]
        for name, duration_ns in timings.finish_times_ns(now_ns).items():
            engine.histogram[name].observe(duration_ns / S)
        engine.histogram["request_prompt_tokens"].observe(timings.prompt_tokens)
        engine.histogram["request_generation_tokens"].observe(timings.generated)
        engine.histogram["request_params_max_tokens"].observe(timings.max_tokens)
        engine.histogram["request_num_preemptions"].observe(timings.preemptions)
        engine.histogram["request_prefill_kv_computed_tokens"].observe(timings.prompt_tokens - timings.cached_tokens)
        engine.enum["request_success", reason.value].inc()
        self._close_choice(engine, timings)

    def _close_choice(self, engine: _EngineChildren, timings: RequestTimings) -> None:
        group = timings.group
        group.open -= 1
        group.longest = max(group.longest, timings.generated)
        if group.open == 0:
            engine.histogram["request_max_num_generation_tokens"].observe(group.longest)
            engine.histogram["request_params_n"].observe(group.n)

    def request_metrics_ms(self, request_id: str) -> dict[str, float | None] | None:
        """The timings of a live request so far."""
        timings = self._live.get(request_id)
        return None if timings is None else timings.request_metrics_ms()

    def on_dropped(self, request_ids: Iterable[str]) -> None:
        """The clients of these sequences are gone, or they were aborted by id: nothing more is recorded of them."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def on_sleep(self, rank: int, state: str) -> None:
        """Engine `rank` is in one of SLEEP_STATES."""
        if state not in SLEEP_STATES:
            raise ValueError(f"sleep state {state!r} is none of {', '.join(SLEEP_STATES)}")
        for name in SLEEP_STATES:
            self._engines[rank].enum["engine_sleep_state", name].value = float(name == state)

    def on_sleep_operation(self, operation: str, duration_s: float | None = None) -> None:
        """One of SLEEP_OPERATIONS begins or, with a duration, has returned. The series begin with the first (vLLM 0.33)."""
        if self._sleep is None:
            self._sleep = self.store.histograms(SLEEP_TIME), self.store.values(SLEEP_IN_FLIGHT)
        times, in_flight = self._sleep
        in_flight.child(operation).value += 1 if duration_s is None else -1
        if duration_s is not None:
            times.child(operation).observe(duration_s)

    def reset_media(self) -> None:
        """Forget which media were seen."""
        self._media.clear()

    def on_tool_parser(self, *, streaming: bool, called: bool, request_type: str, times: int = 1) -> None:
        """A tool-call parser looked at `times` deltas (or choices). Unknown request types count as `other`."""
        kind = request_type if request_type in TOOL_REQUEST_TYPES else "other"
        self._tool_calls.child(self._model_name, TOOL_MODES[not streaming], TOOL_OUTCOMES[not called], kind).inc(times)

    def on_http(
        self, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None:
        """An HTTP request ended. `handler` is the route's template, `none` for an unknown path; sizes: Content-Length or 0."""
        if handler in UNRECORDED_PATHS:
            return
        self._http_requests.child(handler, method, f"{status // 100}xx").inc()
        self._http_request_size.child(handler).observe(request_bytes)
        self._http_response_size.child(handler).observe(response_bytes)
        self._http_highr.observe(duration_s)
        self._http_duration.child(handler, method).observe(duration_s)

    def live(self) -> Iterator[str]:
        """The sequences whose timings are held; empty when the server is idle."""
        return iter(self._live)
