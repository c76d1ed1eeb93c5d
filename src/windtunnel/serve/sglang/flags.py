"""SGLang's flags: what both flavours share, under the same names, and SGLang's own (SGLang 0.5.23)."""

from typing import Any

from windtunnel.core.sglang.config import POLICIES
from windtunnel.core.sglang.profiles import profile
from windtunnel.serve import flag_values as values
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.flag import Flag, FlagTable
from windtunnel.serve.nixl import library
from windtunnel.serve.sglang.disagg_flags import DISAGG_FLAGS
from windtunnel.serve.sglang.engines import sglang_engine_config
from windtunnel.serve.sglang.foreign_flags import SGLANG_FOREIGN_FLAGS
from windtunnel.serve.sglang.kv_config import parse_sglang_kv_events
from windtunnel.serve.vllm_flags import FLAGS

DEFAULT_PORT = 30000

_SHARED_WITHOUT_SECTION = frozenset(
    """engine host port grpc-port grpc-on-http-port served-model-name enable-lora seed stream-interval tool-call-parser
    reasoning-parser
    shutdown-timeout shutdown-outcome watchdog-interval startup-duration timeout-keep-alive disable-access-log
    ssl-certfile ssl-keyfile fault pod-name pod-namespace hash-seed""".split()
)
_SHARED_SECTIONS = ("pacing", "generation", "failures", "limits")


def _shared(flag: Flag) -> bool:
    section, dot, _ = flag.target.partition(".")
    return section in _SHARED_SECTIONS if dot else flag.name in _SHARED_WITHOUT_SECTION


def _profile(value: Any) -> str:
    return profile(str(value)).version


def _lora_paths(value: Any) -> tuple[tuple[str, str], ...]:
    """`NAME=PATH`, or a path that is its own name."""
    items = value if isinstance(value, list | tuple) else [value]
    return values.lora_modules([item if "=" in item or item.startswith("{") else f"{item}={item}" for item in items])


_POSITIVE = values.integer(1)
_SWITCH: dict[str, Any] = {"parse": values.boolean, "switch": True}

OWN_FLAGS: tuple[Flag, ...] = (
    Flag("model-path", "model", values.text, "model name; any name works", aliases=("model",)),
    Flag("tokenizer-path", "tokenizer", values.optional(values.text), "folder with tokenizer.json", aliases=("tokenizer",)),
    Flag("lora-paths", "lora_modules", _lora_paths, "adapters as NAME=PATH", many=True),
    Flag(
        "context-length", "scheduler.max_model_len", values.integer(2), "context window in tokens", aliases=("max-model-len",)
    ),
    Flag("random-seed", "seed", values.integer(0), "seed of everything random"),
    Flag("api-key", "api_keys", values.texts, "key that protects everything but health and metrics", many=True),
    Flag("admin-api-key", "sglang.admin_api_key", values.optional(values.text), "key of the operator's routes"),
    Flag("sglang-profile", "sglang.profile", _profile, "which SGLang release to imitate, 0.4.10 to 0.5.23"),
    Flag("dp-size", "data_parallel_size", values.integer(1, 256), "engine ranks", aliases=("dp", "data-parallel-size")),
    Flag(
        "tp-size",
        "sglang.tp_size",
        values.integer(1, 64),
        "tensor-parallel ranks, in metrics and /server_info",
        aliases=("tp", "tensor-parallel-size"),
    ),
    Flag("max-total-tokens", "sglang.max_total_tokens", _POSITIVE, "tokens of the KV pool"),
    Flag("page-size", "sglang.page_size", _POSITIVE, "tokens in a page"),
    Flag("max-running-requests", "sglang.max_running_requests", _POSITIVE, "most running requests", live=True),
    Flag("max-queued-requests", "sglang.max_queued_requests", values.optional(values.integer(0)), "(503)", live=True),
    Flag("chunked-prefill-size", "sglang.chunked_prefill_size", values.integer(-1), "prompt tokens in a batch; -1 is off"),
    Flag("max-prefill-tokens", "sglang.max_prefill_tokens", _POSITIVE, "token budget of a prefill batch", live=True),
    Flag("schedule-policy", "sglang.schedule_policy", values.choice(*POLICIES), "order of the waiting queue"),
    Flag("schedule-low-priority-values-first", "sglang.schedule_low_priority_values_first", help="smaller first", **_SWITCH),
    Flag("schedule-conservativeness", "sglang.schedule_conservativeness", values.number(0.01, 100), "how much is reserved"),
    Flag("disable-radix-cache", "sglang.disable_radix_cache", help="no prefix cache", **_SWITCH),
    Flag("disable-overlap-schedule", "sglang.disable_overlap_schedule", help="results before the next batch", **_SWITCH),
    Flag("decode-log-interval", "sglang.decode_log_interval", _POSITIVE, "decode steps between two reports", live=True),
    Flag("log-batches", "sglang.log_batches", help='log "Prefill batch, …" and "Decode batch, …" as SGLang does', **_SWITCH),
    Flag(
        "enable-metrics",
        "sglang.enable_metrics",
        help="serve /metrics (on by default, other than in SGLang: --no-enable-metrics)",
        **_SWITCH,
    ),
    Flag(
        "enable-metrics-for-all-schedulers",
        "sglang.enable_metrics_for_all_schedulers",
        help="scheduler metrics of every tensor-parallel rank",
        **_SWITCH,
    ),
    Flag("kv-events-config", "kv_events.*", parse_sglang_kv_events, 'where KV events go: {"publisher": "zmq", …}'),
    Flag("enable-cache-report", "sglang.enable_cache_report", help="cached tokens in usage", **_SWITCH),
    Flag(
        "incremental-streaming-output", "sglang.incremental_streaming_output", help="native events carry what is new", **_SWITCH
    ),
    Flag("weight-version", "sglang.weight_version", values.text, "shown in answers and /model_info"),
    Flag(
        "health-generation",
        "sglang.health_generation",
        help="/health runs a request (also SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION)",
        **_SWITCH,
    ),
    Flag("health-check-timeout", "sglang.health_check_timeout_ns", values.seconds, "(also SGLANG_HEALTH_CHECK_TIMEOUT)"),
    Flag(
        "request-state-wait-timeout",
        "sglang.request_state_wait_ns",
        values.seconds,
        "how often a waiting answer looks for its client (also SGLANG_REQUEST_STATE_WAIT_TIMEOUT)",
    ),
    Flag(
        "req-waiting-timeout",
        "sglang.req_waiting_timeout_ns",
        values.optional(values.seconds),
        "longest wait in the queue (also SGLANG_REQ_WAITING_TIMEOUT)",
        live=True,
    ),
    Flag(
        "req-running-timeout",
        "sglang.req_running_timeout_ns",
        values.optional(values.seconds),
        "longest run (also SGLANG_REQ_RUNNING_TIMEOUT)",
        live=True,
    ),
)

SGLANG_FLAGS = FlagTable(
    (*(flag for flag in FLAGS if _shared(flag)), *OWN_FLAGS, *DISAGG_FLAGS),
    SGLANG_FOREIGN_FLAGS,
    DEFAULT_PORT,
)


_VLLM_FAULTS = frozenset({"head-of-line-wedge"})


def check_sglang(config: ServeConfig) -> None:
    """Limits that only the engine knows; the message names the setting."""
    for name in config.faults:
        if name.partition(":")[0] in _VLLM_FAULTS:
            raise UsageError(f"--fault {name}: this defect is in vLLM's block pool; it needs --engine vllm")
    if config.disagg.mode == "prefill" and config.disagg.transfer_backend == "fake":
        raise UsageError("--disaggregation-transfer-backend fake is a decode's: a prefill has nobody to send to")
    if config.disagg.on and config.disagg.transfer_backend == "nixl" and not library.installed():
        raise UsageError(f"--disaggregation-transfer-backend nixl {library.MISSING}")
    try:
        sglang_engine_config(config)
    except ValueError as error:
        told = str(error).replace("max_total_num_tokens", "max_total_tokens")
        raise UsageError(f"--{told.replace('_', '-')}") from None
