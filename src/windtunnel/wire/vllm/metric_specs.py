"""The series of a vLLM server: names, types, labels, buckets (vLLM reference §4). Data; `metrics` feeds them."""

from collections.abc import Mapping

from windtunnel.core.outputs import FinishReason
from windtunnel.wire.metrics import MetricSpec

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

SLEEP_OPERATIONS = ("sleep", "release_kv_cache_memory", "wake")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
ENUMS: Mapping[str, tuple[str, ...]] = {
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
