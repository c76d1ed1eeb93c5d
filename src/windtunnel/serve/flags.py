"""Every setting of `windtunnel serve`, as one table: command line, `/admin/config` and the docs read it.

Names and defaults are vLLM's where vLLM has the setting. The names of llm-d-inference-sim are accepted as aliases.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from windtunnel.core.physics import GPUS, MODELS
from windtunnel.core.profile import MOST_CORES, Profile, from_mapping
from windtunnel.core.units import LONGEST_S, parse_duration_ns
from windtunnel.serve.config import TOO_DEEP, ServeConfig, UsageError
from windtunnel.serve.config_file import read_config_file
from windtunnel.serve.failures import FAILURES
from windtunnel.serve.foreign_flags import FOREIGN_FLAGS, SHORT_FLAGS
from windtunnel.serve.kv_config import check_kv_events, parse_endpoint, parse_kv_events
from windtunnel.serve.seams import pair_of, resolve
from windtunnel.serve.transfer import parse_fates
from windtunnel.serve.vllm_pd.settings import EXAMPLE, MEMBERS, read_json
from windtunnel.wire.kv_events import FORMATS, HASH_FORMS

Parse = Callable[[Any], Any]


def _duration(value: Any) -> int:
    return parse_duration_ns(value)


def _seconds(value: Any) -> int:
    """Durations of flags that the real server counts in seconds: a bare number is seconds, a text may have a unit."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration")
    try:
        seconds = float(value)
    except ValueError:
        return parse_duration_ns(value)
    if not 0 <= seconds <= LONGEST_S:
        raise ValueError(f"{value} is out of range: it must be between 0 and {LONGEST_S} seconds")
    return round(seconds * 1e9)


def _whole(value: Any) -> int:
    """Of digits, or a number of JSON. Raises ValueError with the value as it was given."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return int(value)
    raise ValueError(f"{str(value)[:_SHOWN_CHARS]!r} is not a whole number")


_SHOWN_CHARS = 100


def _integer(low: int, high: int = 1 << 62) -> Parse:
    def parse(value: Any) -> int:
        number = _whole(value)
        if not low <= number <= high:
            bound = f" and at most {high}" if high < 1 << 62 else ""
            raise ValueError(f"{number} is out of range: it must be at least {low}{bound}")
        return number

    return parse


def _optional(parse: Parse) -> Parse:
    return lambda value: None if value in (None, "none", "None", "null") else parse(value)


def _number(low: float, high: float) -> Parse:
    def parse(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{str(value)[:_SHOWN_CHARS]!r} is not a number")
        if not low <= number <= high:
            raise ValueError(f"{number} is out of range: it must be between {low} and {high}")
        return number

    return parse


def _boolean(value: Any) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def _grpc_switch(value: Any) -> int | None:
    """vLLM's `--grpc` has gRPC in place of HTTP; here both are served."""
    return _GRPC_PORT if _boolean(value) else None


_GRPC_PORT = 50051


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a non-empty text")
    return value


def _choice(*allowed: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return parse


def _mode(value: Any) -> str:
    """`random` is llm-d-inference-sim's name for sentences of a fixed list."""
    return _choice("oracle", "echo", "sentence")("sentence" if value == "random" else value)  # type: ignore[no-any-return]


def _megabytes(value: Any) -> int:
    return int(_integer(1, 1024)(value)) * 1024 * 1024


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in (value if isinstance(value, list | tuple) else [value]))


def _json_texts(value: Any) -> tuple[str, ...]:
    """vLLM writes such lists as JSON on the command line."""
    if isinstance(value, list | tuple):
        value = value[0] if len(value) == 1 else list(value)
    items = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    return tuple(items) if isinstance(items, list | tuple) else (str(items),)


def _failure_types(value: Any) -> tuple[str, ...]:
    kinds = _texts(value) if value else ()
    for kind in kinds:
        if kind not in FAILURES:
            raise ValueError(f"{kind!r} is not one of {', '.join(FAILURES)}")
    return kinds


def _map_or_array(value: Any) -> str:
    return "map" if _boolean(value) else "array"


_LONGEST_ANSWER = 1 << 31


def _range(value: Any) -> tuple[int, int]:
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError(f"{value!r} is not a range: write LOW:HIGH")
    low, high = map(_whole, parts)
    if not 1 <= low <= high <= _LONGEST_ANSWER:
        raise ValueError(f"{low}:{high} is not a range: write LOW:HIGH with 1 <= LOW <= HIGH <= {_LONGEST_ANSWER}")
    return low, high


def _lora_modules(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple(_lora_module(item) for item in (value if isinstance(value, list | tuple) else [value]))


def _lora_module(item: str) -> tuple[str, str]:
    if item.lstrip().startswith("{"):
        fields = json.loads(item)
        return str(fields["name"]), str(fields["path"])
    name, separator, path = item.partition("=")
    if not separator or not name or not path:
        raise ValueError(f"{item!r} is not NAME=PATH")
    return name, path


def _profile(value: Any) -> Profile:
    """A file's name, or the content itself (`/admin/config`)."""
    if isinstance(value, Mapping):
        return from_mapping(value)
    name = _text(value)
    try:
        with open(name, encoding="utf-8") as file:
            return from_mapping(json.loads(file.read(_LARGEST_PROFILE)))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{name}: {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_LARGEST_PROFILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `target` is the dotted place in ServeConfig; `live` ones can be changed while the server runs."""

    name: str
    target: str
    parse: Parse
    help: str
    live: bool = False
    many: bool = False
    switch: bool = False
    """A flag without a value, with a `--no-` twin."""
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name in `/admin/config`."""
        return self.name.replace("-", "_")


_POSITIVE = _integer(1)
_COUNT = _integer(0)

_KV_TRANSFER_FLAGS: tuple[Flag, ...] = (
    Flag("kv-transfer-config", "kv_transfer.told", read_json, f"the KV connector of a P/D worker: {EXAMPLE}"),
    *(
        Flag(f"kv-transfer-config.{name.replace('_', '-')}", f"kv_transfer.{name}", _text, f"its member {name} alone")
        for name in MEMBERS
    ),
    Flag(
        "nixl-side-channel-host",
        "kv_transfer.side_channel_host",
        _text,
        "where others find this engine (also VLLM_NIXL_SIDE_CHANNEL_HOST; localhost)",
    ),
    Flag(
        "nixl-side-channel-port",
        "kv_transfer.side_channel_port",
        _integer(0, 65535),
        "plus the data-parallel rank; 0 picks free ones (also VLLM_NIXL_SIDE_CHANNEL_PORT; 5600)",
    ),
    Flag(
        "nixl-hold",
        "kv_transfer.hold",
        _choice("lease", "timeout"),
        "how long a prefill holds blocks: a lease that heartbeats extend, or one timeout, as releases before vLLM #41383",
    ),
    Flag(
        "nixl-abort-request-timeout",
        "kv_transfer.abort_timeout_ns",
        _seconds,
        "that timeout (also VLLM_NIXL_ABORT_REQUEST_TIMEOUT; 480 s)",
    ),
    Flag(
        "mooncake-host",
        "kv_transfer.mooncake_host",
        _text,
        "where others find a Mooncake engine and its bootstrap server (localhost; vLLM takes the machine's own address)",
    ),
    Flag(
        "mooncake-bootstrap-port",
        "kv_transfer.mooncake_bootstrap_port",
        _integer(0, 65535),
        "of a prefill; 0 picks a free one (also VLLM_MOONCAKE_BOOTSTRAP_PORT; 8998)",
    ),
    Flag(
        "mooncake-abort-request-timeout",
        "kv_transfer.mooncake_abort_timeout_ns",
        _seconds,
        "how long a prefill holds blocks, and waits for a request (also VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT; 480 s)",
    ),
    Flag(
        "mooncake-connector-timeout",
        "kv_transfer.mooncake_connector_timeout_ns",
        _seconds,
        "of one question to a bootstrap server (also VLLM_MOONCAKE_CONNECTOR_TIMEOUT; 30 s)",
    ),
    Flag(
        "kv-transfer-backend",
        "kv_transfer.backend",
        _choice("sim", "nixl"),
        "sim models the time of a move; nixl moves real bytes (needs the package nixl)",
    ),
    Flag("nixl-block-bytes", "kv_transfer.nixl_block_bytes", _integer(32, 1 << 24), "real bytes of a block (4096)"),
    Flag("transfer-bandwidth", "kv_transfer.bandwidth_gb_s", _number(1e-9, 1e6), "10^9 bytes a second between P/D workers"),
    Flag("transfer-latency", "kv_transfer.transfer_latency_ns", _duration, "of each read or write"),
    Flag("transfer-dead-peer", "kv_transfer.dead_peer_ns", _duration, "until the transport reports a peer that has gone"),
    Flag("transfer-fates", "kv_transfer.fates", parse_fates, "shares of moves that stall, fail or lose their peer: stall=0.01"),
)

FLAGS: tuple[Flag, ...] = (
    Flag("model", "model", _text, "model name; any name works"),
    Flag("engine", "engine", _choice("vllm", "sglang"), "which server to simulate"),
    Flag("host", "host", _text, "address to listen on"),
    Flag("port", "port", _integer(0, 65535), "TCP port; 0 picks a free one"),
    Flag("grpc-port", "grpc_port", _optional(_integer(0, 65535)), "serve gRPC too, on this TCP port; 0 picks a free one"),
    Flag("grpc-on-http-port", "grpc_on_http_port", _boolean, "serve gRPC on the same port as HTTP", switch=True),
    Flag("grpc", "grpc_port", _grpc_switch, "the same on port 50051, vLLM's own; HTTP stays", switch=True),
    Flag("served-model-name", "served_model_names", _texts, "public model names; the first is used in answers", many=True),
    Flag("tokenizer", "tokenizer", _optional(_text), "folder with tokenizer.json; without it the built-in tokenizer"),
    Flag("lora-modules", "lora_modules", _lora_modules, "adapters as NAME=PATH", many=True),
    Flag("enable-lora", "enable_lora", _boolean, "adapters may be served", switch=True),
    Flag(
        "allow-runtime-lora-updating",
        "runtime_lora",
        _boolean,
        "serve the routes that load and unload adapters (also VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
        switch=True,
    ),
    Flag("seed", "seed", _COUNT, "seed of everything random"),
    Flag("vllm-version", "vllm_version", _text, "which vLLM release to imitate (0.32.0 or 0.33.0)"),
    Flag("api-key", "api_keys", _texts, "keys that protect /v1, /v2, /inference", many=True),
    Flag("allowed-origins", "allowed_origins", _json_texts, "CORS origins, as a JSON list", many=True),
    Flag("dev-mode", "dev_mode", _boolean, "serve vLLM's developer routes (also VLLM_SERVER_DEV_MODE=1)", switch=True),
    Flag("enable-scale-out", "enable_scale_out", _boolean, "serve token-in/token-out and render routes", switch=True),
    Flag("enable-tokenizer-info-endpoint", "enable_tokenizer_info_endpoint", _boolean, "serve /tokenizer_info", switch=True),
    Flag("profiler-config", "profiler_config", _optional(_text), "any value: serve /start_profile and /stop_profile"),
    Flag("enable-server-load-tracking", "enable_server_load_tracking", _boolean, "count requests in /load", switch=True),
    Flag(
        "enable-responses-store",
        "enable_responses_store",
        _boolean,
        switch=True,
        help="keep responses for GET, background and previous_response_id (also VLLM_ENABLE_RESPONSES_API_STORE=1)",
    ),
    Flag("disable-fastapi-docs", "disable_fastapi_docs", _boolean, "no /openapi.json, /docs, /redoc", switch=True),
    Flag("runner", "runner", _choice("generate", "pooling"), "what the model does: text or vectors"),
    Flag("convert", "convert", _optional(_choice("embed", "classify")), "what a pooling model gives"),
    Flag("embedding-size", "embedding_size", _integer(1, 65536), "dimensions of a pooling model's vectors"),
    Flag("num-labels", "num_labels", _integer(1, 65536), "classes of a classifying model"),
    Flag("enable-prompt-tokens-details", "enable_prompt_tokens_details", _boolean, "cached tokens in usage", switch=True),
    Flag(
        "enable-per-request-metrics",
        "enable_per_request_metrics",
        _boolean,
        "timings of each request in its answer",
        switch=True,
    ),
    Flag("enable-force-include-usage", "enable_force_include_usage", _boolean, "usage in every stream", switch=True),
    Flag("enable-auto-tool-choice", "enable_auto_tool_choice", _boolean, "allow tool_choice auto", switch=True),
    Flag("tool-call-parser", "tool_call_parser", _optional(_text), "tool call format, such as hermes"),
    Flag("reasoning-parser", "reasoning_parser", _optional(_text), "reasoning format, such as qwen3"),
    Flag("enable-request-id-headers", "enable_request_id_headers", _boolean, "X-Request-Id in answers", switch=True),
    Flag("enable-log-requests", "enable_log_requests", _boolean, "log requests and aborts", switch=True),
    Flag("return-tokens-as-token-ids", "return_tokens_as_token_ids", _boolean, "spell logprob tokens token_id:N", switch=True),
    Flag("trust-request-chat-template", "trust_request_chat_template", _boolean, "chat_template in requests", switch=True),
    Flag("media-tokens", "media_tokens", _integer(0, 1 << 20), "tokens of each image, sound or film in a chat; 0: text only"),
    Flag("max-logprobs", "max_logprobs", _integer(-1), "most alternatives per token"),
    Flag("stream-interval", "stream_interval", _POSITIVE, "tokens per stream chunk"),
    Flag("sse-keep-alive-interval", "sse_keep_alive_interval_ns", _seconds, "comment frames on silent streams", live=True),
    Flag("shutdown-timeout", "shutdown_timeout_ns", _seconds, "how long SIGTERM waits for requests at work"),
    Flag("shutdown-outcome", "shutdown_outcome", _choice("error", "clean", "hang"), "how requests left at shutdown end"),
    Flag("watchdog-interval", "watchdog_ns", _duration, "how often the server looks whether its engine has died"),
    Flag(
        "keep-alive-on-engine-death",
        "keep_alive_on_engine_death",
        _boolean,
        "stay after the engine's death (also VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1)",
        switch=True,
    ),
    Flag("startup-duration", "startup_ns", _duration, "how long /health/ready answers 503"),
    Flag("timeout-keep-alive", "timeout_keep_alive_ns", _seconds, "when idle connections are closed"),
    Flag("disable-access-log", "disable_access_log", _boolean, "no log", switch=True, aliases=("disable-uvicorn-access-log",)),
    Flag("ssl-certfile", "ssl_certfile", _optional(_text), "TLS certificate"),
    Flag("ssl-keyfile", "ssl_keyfile", _optional(_text), "TLS key"),
    Flag("fault", "faults", _texts, "plant a defect (see `windtunnel faults`)", many=True),
    Flag("pacing", "pacing.model", _choice("request", "step"), "per-request model or step model", live=True),
    Flag(
        "ttft",
        "pacing.ttft_ns",
        _duration,
        "time to first token",
        live=True,
        aliases=("time-to-first-token", "prefill-overhead"),
    ),
    Flag("ttft-std", "pacing.ttft_std_ns", _duration, "its spread", live=True, aliases=("time-to-first-token-std-dev",)),
    Flag("itl", "pacing.itl_ns", _duration, "inter-token latency", live=True, aliases=("inter-token-latency",)),
    Flag("itl-std", "pacing.itl_std_ns", _duration, "its spread", live=True, aliases=("inter-token-latency-std-dev",)),
    Flag(
        "prefill-token-time",
        "pacing.prefill_token_ns",
        _duration,
        "per uncached prompt token",
        live=True,
        aliases=("prefill-time-per-token",),
    ),
    Flag("latency-distribution", "pacing.distribution", _choice("normal", "lognormal", "uniform"), "shape of it", live=True),
    Flag("step-base", "pacing.step_base_ns", _duration, "step model: cost of a step", live=True),
    Flag("step-prefill-token", "pacing.step_prefill_token_ns", _duration, "step model: per prefill token", live=True),
    Flag("step-decode-seq", "pacing.step_decode_seq_ns", _duration, "step model: per running sequence", live=True),
    Flag("gpu", "pacing.gpu", _optional(_choice(*GPUS)), "pace steps by the physics of a GPU (docs/calibration.md)", live=True),
    Flag("gpu-model", "pacing.gpu_model", _choice(*MODELS), "whose weights and KV cache that GPU reads", live=True),
    Flag(
        "tensor-parallel-size",
        "pacing.tensor_parallel",
        _integer(1, 64),
        "GPUs that share a step; counts with --gpu only",
        live=True,
    ),
    Flag("profile", "pacing.profile", _optional(_profile), "file that windtunnel calibrate has written", live=True),
    Flag(
        "other-jobs",
        "pacing.other_jobs",
        _number(0, MOST_CORES),
        "cores that other jobs take of the profile's machine",
        live=True,
    ),
    Flag("time-scale", "pacing.time_scale", _number(0.001, 1000), "divide every simulated duration by this", live=True),
    Flag("mode", "generation.mode", _mode, "what is generated: oracle, echo or sentence", live=True),
    Flag("natural-length", "generation.natural_length", _range, "length of natural answers, as LOW:HIGH tokens", live=True),
    Flag("responses", "generation.responses_file", _optional(_text), "JSONL file of recorded answers"),
    Flag("max-model-len", "scheduler.max_model_len", _POSITIVE, "context window in tokens"),
    Flag("max-num-seqs", "scheduler.max_num_seqs", _POSITIVE, "most sequences in a step", live=True),
    Flag("max-num-batched-tokens", "scheduler.max_num_batched_tokens", _POSITIVE, "token budget of a step", live=True),
    Flag("block-size", "scheduler.block_size", _POSITIVE, "tokens in a KV block"),
    Flag("num-gpu-blocks-override", "scheduler.num_gpu_blocks", _integer(2), "KV blocks", aliases=("kv-cache-size",)),
    Flag("enable-prefix-caching", "scheduler.enable_prefix_caching", _boolean, "reuse KV of equal prefixes", switch=True),
    Flag("scheduling-policy", "scheduler.scheduling_policy", _choice("fcfs", "priority"), "order of the waiting queue"),
    Flag("watermark", "scheduler.watermark", _number(0, 1), "share of blocks kept free at admission"),
    Flag("scheduler-reserve-full-isl", "scheduler.reserve_full_isl", _boolean, "admit only what fits whole", switch=True),
    Flag("long-prefill-token-threshold", "scheduler.long_prefill_token_threshold", _COUNT, "longest prefill chunk; 0 is off"),
    Flag(
        "max-num-queued-reqs",
        "scheduler.max_num_queued_reqs",
        _optional(_COUNT),
        "waiting limit (503)",
        live=True,
        aliases=("max-waiting-queue-length",),
    ),
    Flag("max-num-queued-tokens", "scheduler.max_num_queued_tokens", _optional(_COUNT), "the same in tokens", live=True),
    Flag("max-loras", "scheduler.max_loras", _POSITIVE, "adapters in one step"),
    Flag("async-scheduling", "scheduler.async_scheduling", _boolean, "schedule one step ahead", switch=True),
    Flag(
        "prefix-caching-hash-algo",
        "scheduler.prefix_caching_hash_algo",
        _choice("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        "block hash",
    ),
    Flag(
        "kv-offloading-size",
        "scheduler.kv_offloading_gib",
        _number(0, 1 << 20),
        "GiB of host memory for blocks that leave the GPU pool, by --gpu-model's bytes for a token; 0 is off",
    ),
    Flag("kv-offloading-blocks", "scheduler.kv_offloading_blocks", _COUNT, "the same as a number of blocks"),
    Flag("kv-offloading-block-time", "scheduler.kv_offloading_block_ns", _duration, "what bringing one block back costs"),
    Flag(
        "kv-offloading-disk-blocks",
        "scheduler.kv_offloading_disk_blocks",
        _COUNT,
        "blocks on disk, behind those in host memory",
    ),
    Flag("kv-offloading-disk-block-time", "scheduler.kv_offloading_disk_block_ns", _duration, "the same cost, from disk"),
    Flag("data-parallel-size", "data_parallel_size", _integer(1, 256), "engine ranks"),
    Flag("kv-events-config", "kv_events.*", parse_kv_events, 'where KV events go: {"enable_kv_cache_events": true, …}'),
    Flag("kv-events-format", "kv_events.form", _choice(*FORMATS), "KV events as maps (0.32 and later) or arrays"),
    Flag("use-vllm-map-event-format", "kv_events.form", _map_or_array, "the same, as llm-d-inference-sim says it", switch=True),
    Flag(
        "kv-events-hashes", "kv_events.hashes", _choice(*HASH_FORMS), "block hashes in KV events: 64 bits or the whole digest"
    ),
    Flag(
        "enable-kvcache", "kv_events.enable_kv_cache_events", _boolean, "publish KV events (llm-d-inference-sim)", switch=True
    ),
    Flag("zmq-endpoint", "kv_events.endpoint", parse_endpoint, "where to publish them (llm-d-inference-sim)"),
    Flag(
        "kv-events-replay-endpoint", "kv_events.replay_endpoint", _optional(parse_endpoint), "their replay (llm-d's simulator)"
    ),
    Flag("kv-events-replay-queue-size", "kv_events.buffer_steps", _POSITIVE, "batches kept for replay (llm-d-inference-sim)"),
    *_KV_TRANSFER_FLAGS,
    Flag("event-batch-size", "kv_events.batch_events", _integer(1, 1 << 20), "KV events of a batch; 1: those of a step"),
    Flag("failure-injection-rate", "failures.rate_percent", _integer(0, 100), "percent that fails on purpose", live=True),
    Flag("failure-types", "failures.types", _failure_types, "how they fail; all kinds when empty", many=True, live=True),
    Flag("max-body-bytes", "limits.body_bytes", _POSITIVE, "largest request body (413)"),
    Flag("max-request-body-size-mb", "limits.body_bytes", _megabytes, "the same in MiB, as llm-d-inference-sim has it"),
    Flag("hash-seed", "hash_seed", _optional(_text), "seed of block hashes (also PYTHONHASHSEED)"),
    Flag("pod-name", "pod_name", _optional(_text), "x-inference-pod and x-inference-port in answers (also POD_NAME)"),
    Flag("pod-namespace", "pod_namespace", _optional(_text), "x-inference-namespace in answers (also POD_NAMESPACE)"),
    Flag("body-timeout", "limits.body_timeout_ns", _duration, "longest time for a body to arrive (408)"),
    Flag("max-head-bytes", "limits.head_bytes", _integer(1024), "largest request head (431)"),
    Flag("head-timeout", "limits.head_timeout_ns", _duration, "longest time for a head to arrive (408)"),
    Flag("write-buffer-bytes", "limits.write_buffer_bytes", _integer(4096), "unsent bytes after which a stream is held back"),
    Flag("write-deadline", "limits.write_deadline_ns", _duration, "how long a held-back stream may stay so before it is cut"),
    Flag("max-stored-responses", "limits.stored_responses", _POSITIVE, "most responses kept; the oldest goes first"),
    Flag("max-choices", "limits.choices", _POSITIVE, "most choices of one request: prompts x n (400)"),
    Flag("max-open-answers", "limits.open_answers", _POSITIVE, "most requests at work at once"),
    Flag("max-connections", "limits.connections", _POSITIVE, "most connections at once; requests on further ones get 503"),
)


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one flavour. `foreign` ones exist in real servers and mean nothing here."""

    flags: tuple[Flag, ...]
    foreign: frozenset[str]
    default_port: int
    by_name: Mapping[str, Flag] = field(init=False)

    def __post_init__(self) -> None:
        named = {name: flag for flag in self.flags for name in (flag.name, *flag.aliases)}
        object.__setattr__(self, "by_name", named)

    @property
    def live(self) -> list[str]:
        return sorted(flag.key for flag in self.flags if flag.live)


VLLM_FLAGS = FlagTable(FLAGS, FOREIGN_FLAGS, 8000)


def table_of(engine: str) -> FlagTable:
    if engine != "sglang":
        return VLLM_FLAGS
    from windtunnel.serve.sglang.flags import SGLANG_FLAGS

    return SGLANG_FLAGS


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    config: ServeConfig
    warnings: tuple[str, ...]


def parse_args(args: Sequence[str], sources: Mapping[str, str] = MappingProxyType({})) -> ParsedFlags:
    """Command-line arguments to a configuration.

    Raises UsageError that names the flag, or what `sources` has for it: the environment variable that it comes from.
    """
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    warnings: list[str] = []
    told = list(_split(args))
    table = table_of(_engine(told))
    for name, given in _with_file(told, table):
        flag, value = _lookup(name, given, table)
        if flag is None:
            warnings.append(f"--{name} is a flag of the real server that means nothing here: ignored")
            continue
        if named.setdefault(flag.target, name) != name:
            warnings.append(f"--{named[flag.target]} and --{name} set the same thing: the last one holds")
            named[flag.target] = name
        values.update(_targets(flag, _parse(flag, sources.get(name, f"--{name}"), value)))
    if "model" not in values:
        raise UsageError("--model is missing: windtunnel serve --model NAME")
    values.setdefault("port", table.default_port)
    return ParsedFlags(check(apply_values(ServeConfig(model=values["model"]), values)), tuple(warnings))


Given = Sequence[tuple[str, list[Any]]]


def _engine(given: Given) -> str:
    """Which table is meant: the command line's or else the file's `engine`."""
    files = [values for name, values in given if name == "config"]
    named = [values for name, values in given if name == "engine"]
    if not named and len(files) == 1 and len(files[0]) == 1:
        named = [values for name, values in read_config_file(files[0][0]) if name == "engine"]
    return str(named[-1][0]) if named and named[-1] else "vllm"


def _with_file(given: Given, table: FlagTable) -> Given:
    """What `--config` names comes first, so that the command line beats it."""
    files = [values for name, values in given if name == "config"]
    if not files:
        return given
    if len(files) > 1 or len(files[0]) != 1:
        raise UsageError("--config takes one file: a YAML or TOML map of flag names to values")
    rest = [(name, values) for name, values in given if name != "config"]
    told = {table.by_name[name].target for name, _ in rest if name in table.by_name}
    return [*(item for item in read_config_file(files[0][0]) if _target(item[0], table) not in told), *rest]


def _target(name: str, table: FlagTable) -> str | None:
    flag = table.by_name.get(name)
    return None if flag is None else flag.target


def live_changes(config: ServeConfig, changes: Mapping[str, Any]) -> ServeConfig:
    """The configuration after a POST to `/admin/config`: all changes or, with UsageError, none."""
    values = {}
    table = table_of(config.engine)
    for key, value in changes.items():
        flag = table.by_name.get(key.replace("_", "-"))
        if flag is None or not flag.live:
            names = ", ".join(table.live)
            raise UsageError(f"{key}: not a setting that can be changed while the server runs; those are {names}")
        values[flag.target] = _parse(flag, key, value)
    changed = check(apply_values(config, values))
    if config.scheduler.kv_offloading_gib and changed.pacing.gpu_model != config.pacing.gpu_model:
        raise UsageError(
            f"gpu_model: {config.pacing.gpu_model} says how many blocks --kv-offloading-size holds, and those cannot change "
            "while the server runs; start it with --kv-offloading-blocks instead"
        )
    return changed


def check(config: ServeConfig) -> ServeConfig:
    """What no single flag can see."""
    if config.engine == "sglang":
        from windtunnel.serve.sglang.flags import check_sglang

        check_sglang(config)
    else:
        _check_vllm(config)
    if config.pacing.other_jobs and not (config.pacing.profile and config.pacing.profile.machine.cores):
        raise UsageError("--other-jobs needs a --profile that knows its machine's cores: windtunnel calibrate --cores N")
    for name in config.faults:
        _check_fault(config, name)
    try:
        check_kv_events(config.kv_events, config.data_parallel_size)
    except ValueError as error:
        raise UsageError(f"--kv-events-config: {error}") from None
    if bool(config.ssl_certfile) != bool(config.ssl_keyfile):
        raise UsageError("--ssl-certfile and --ssl-keyfile go together")
    return _with_one_port(config)


def _with_one_port(config: ServeConfig) -> ServeConfig:
    """`--grpc-port` equal to `--port` says the same as `--grpc-on-http-port`."""
    same = config.grpc_port == config.port != 0
    if not (same or config.grpc_on_http_port):
        return config
    if config.grpc_port is not None and not same:
        raise UsageError(f"--grpc-on-http-port and --grpc-port {config.grpc_port} contradict each other: give one")
    if config.ssl_certfile:
        raise UsageError("--grpc-on-http-port serves no TLS: give gRPC a --grpc-port of its own")
    return replace(config, grpc_port=None, grpc_on_http_port=True)


def _check_vllm(config: ServeConfig) -> None:
    scheduler = config.scheduler
    if scheduler.kv_offloading_gib and scheduler.kv_offloading_blocks:
        raise UsageError("--kv-offloading-size and --kv-offloading-blocks say the same thing: give one")
    if (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks) and not scheduler.enable_prefix_caching:
        raise UsageError("--kv-offloading-size needs prefix caching: nothing is found in the host tier without it")
    if config.kv_transfer.on and (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks):
        raise UsageError("--kv-offloading-size and --kv-transfer-config exclude each other: there is no MultiConnector here")
    _check_kv_transfer(config)
    if scheduler.kv_offloading_disk_blocks and not (scheduler.kv_offloading_gib or scheduler.kv_offloading_blocks):
        raise UsageError(
            "--kv-offloading-disk-blocks needs --kv-offloading-size or --kv-offloading-blocks: it stands behind them"
        )
    needed = -(-scheduler.max_model_len // scheduler.block_size) + 1
    if scheduler.num_gpu_blocks < needed:
        raise UsageError(
            f"--num-gpu-blocks-override {scheduler.num_gpu_blocks} is too small: one request of --max-model-len "
            f"{scheduler.max_model_len} needs {needed} blocks of {scheduler.block_size} tokens"
        )
    pacing = config.pacing
    if pacing.gpu is not None and MODELS[pacing.gpu_model].heads % pacing.tensor_parallel:
        heads = MODELS[pacing.gpu_model].heads
        raise UsageError(
            f"--tensor-parallel-size {pacing.tensor_parallel} does not divide the {heads} heads of {pacing.gpu_model}"
        )


def _check_kv_transfer(config: ServeConfig) -> None:
    settings = config.kv_transfer
    if settings.side_channel_port + config.data_parallel_size > _PORTS:
        raise UsageError("--nixl-side-channel-port leaves no port for each data-parallel rank")
    if not settings.on:
        return
    try:
        settings.parsed("-")
    except ValueError as error:
        raise UsageError(f"--kv-transfer-config: {error}") from None


_PORTS = 65536


_PAIRS: Mapping[str, tuple[str, Callable[[ServeConfig], bool]]] = MappingProxyType(
    {
        "sglang-pd": ("--engine sglang --disaggregation-mode prefill|decode", lambda config: config.disagg.on),
        "vllm-pd": ("--kv-transfer-config", lambda config: config.engine == "vllm" and config.kv_transfer.on),
    }
)
"""Kind of P/D pair → the flags that make a server one of its sides, and whether this one is."""


def _check_fault(config: ServeConfig, text: str) -> None:
    try:
        resolve(text)
    except ValueError as error:
        raise UsageError(f"--fault {error}") from None
    if pair := pair_of(text):
        flags, belongs = _PAIRS[pair]
        if not belongs(config):
            raise UsageError(f"--fault {text}: only a server of a {pair} pair can have it: start it with {flags}")


def apply_values(config: ServeConfig, values: Mapping[str, Any]) -> ServeConfig:
    """`config` with dotted targets replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for target, value in values.items():
        section, _, name = target.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    nested = {section: replace(getattr(config, section), **changes) for section, changes in sections.items()}
    return replace(config, **top, **nested)


def _split(args: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """(flag name, its values). A leading bare word is the model, as in `vllm serve MODEL`."""
    rest = list(args)
    if rest and not rest[0].startswith("--"):
        yield "model", [rest.pop(0)]
    while rest:
        head = rest.pop(0)
        head = f"--{SHORT_FLAGS[head]}" if head in SHORT_FLAGS else head
        if not head.startswith("--"):
            raise UsageError(f"{head!r} stands alone: a value must follow a flag")
        name, has_value, value = head[2:].partition("=")
        values = [value] if has_value else []
        while not has_value and rest and not rest[0].startswith("--") and rest[0] not in SHORT_FLAGS:
            values.append(rest.pop(0))
        yield name.replace("_", "-"), values


def _lookup(name: str, given: list[str], table: FlagTable) -> tuple[Flag | None, Any]:
    flag = table.by_name.get(name)
    positive = table.by_name.get(name.removeprefix("no-"))
    if flag is None and positive is not None and positive.switch:
        return positive, False
    if flag is None:
        if name.partition(".")[0].removeprefix("no-") in table.foreign:
            return None, None
        near = get_close_matches(name, [*table.by_name, *table.foreign], n=1)
        raise UsageError(f"--{name} is not a flag" + (f"; did you mean --{near[0]}?" if near else ""))
    return flag, _value(flag, name, given)


def _targets(flag: Flag, value: Any) -> Mapping[str, Any]:
    """Where a parsed value goes; a flag with the target `section.*` sets several members of its section."""
    section, star, _ = flag.target.partition("*")
    return {section + name: member for name, member in value.items()} if star else {flag.target: value}


def _value(flag: Flag, name: str, given: list[str]) -> Any:
    if flag.switch and not given:
        return True
    if not given:
        raise UsageError(f"--{name} needs a value: {flag.help}")
    if flag.many:
        return given
    if len(given) > 1:
        raise UsageError(f"--{name} takes one value, not {len(given)}: {' '.join(given)}")
    return given[0]


def _parse(flag: Flag, name: str, value: Any) -> Any:
    try:
        return flag.parse(value)
    except RecursionError:
        raise UsageError(f"{name}: {TOO_DEEP}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name}: {error}") from None
