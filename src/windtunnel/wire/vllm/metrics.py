"""The metrics of a vLLM server: the folds that feed the series of `metric_specs` (vLLM reference §4).

`VllmMetrics` reads what the engine reports (`on_step`) and what the front end does (`on_submitted`, `on_finished`,
`on_dropped`, `on_rejected`, `on_http`). What moves follows from three rules of the real server:

* Gauges and prefix-cache counters move only with a step that delivers statistics.
* Token counters, TTFT and inter-token latencies move with each output that reaches the front end. So do preemptions: they
  travel with the next output of their request, and one that never speaks again is not counted (recorded on vLLM 0.32).
* Finish-time histograms and `request_success` move only when the front end sees a final output. A client that disconnects
  and an abort by id remove the state first, so nothing is recorded (§3.7, §3.8).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from windtunnel.core.outputs import FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import S
from windtunnel.core.vllm.connector.config import Mode
from windtunnel.wire.metrics import Family, Histogram, MetricSpec, Store, Value
from windtunnel.wire.vllm.kv_metrics import ConnectorMetrics
from windtunnel.wire.vllm.media_cache import MediaCache
from windtunnel.wire.vllm.metric_specs import (
    ENUMS,
    HTTP_DURATION,
    HTTP_HIGHR,
    HTTP_REQUEST_SIZE,
    HTTP_REQUESTS,
    HTTP_RESPONSE_SIZE,
    LORA_SPEC,
    REJECTIONS,
    SLEEP_IN_FLIGHT,
    SLEEP_STATES,
    SLEEP_TIME,
    TOOL_CALLS,
    TOOL_MODES,
    TOOL_OUTCOMES,
    TOOL_REQUEST_TYPES,
    engine_specs,
)
from windtunnel.wire.vllm.timings import PromptGroup, RequestTimings

UNRECORDED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Handlers that the HTTP families leave out (§4.5)."""


class _EngineChildren:
    """The children of one engine rank, looked up once."""

    def __init__(
        self, model: str, rank: int, values: Mapping[str, Family[Value]], histograms: Mapping[str, Family[Histogram]]
    ) -> None:
        engine = str(rank)
        plain = {name: family for name, family in values.items() if name not in ENUMS}
        self.value = {name.removeprefix("vllm:"): family.child(model, engine) for name, family in plain.items()}
        self.enum = {
            (name.removeprefix("vllm:"), value): values[name].child(model, engine, value)
            for name, members in ENUMS.items()
            for value in members
        }
        self.histogram = {name.removeprefix("vllm:"): family.child(model, engine) for name, family in histograms.items()}


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
