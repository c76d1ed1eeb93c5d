"""The server's settings, parsed once at the edge into frozen values."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from windtunnel.core.profile import Profile
from windtunnel.core.units import MS, S
from windtunnel.serve.failures import FailureConfig
from windtunnel.serve.kv_config import KvEventsConfig
from windtunnel.serve.sglang.settings import DisaggSettings
from windtunnel.serve.vllm_pd.settings import KvTransferSettings

Engine = Literal["vllm", "sglang"]
Runner = Literal["generate", "pooling"]
Convert = Literal["embed", "classify"]

TOO_DEEP = "is nested too deeply"
"""What is said of JSON that no parser takes."""


class UsageError(ValueError):
    """A setting that cannot be: names the flag and the right form."""


@dataclass(frozen=True, slots=True)
class PacingConfig:
    """How long things take. Durations in nanoseconds; `time_scale` divides all of them.

    A profile goes before a GPU, and a GPU before `model`.
    """

    model: Literal["request", "step"] = "request"
    ttft_ns: int = 0
    ttft_std_ns: int = 0
    itl_ns: int = 0
    itl_std_ns: int = 0
    prefill_token_ns: int = 0
    distribution: Literal["normal", "lognormal", "uniform"] = "normal"
    step_base_ns: int = 10 * MS
    step_prefill_token_ns: int = 20_000
    step_decode_seq_ns: int = 100_000
    gpu: str | None = None
    gpu_model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    profile: Profile | None = None
    other_jobs: float = 0.0
    """Cores of the profile's machine that other jobs take."""
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What is "generated". `natural_length` is the range in which an answer stops by itself (oracle mode)."""

    mode: Literal["oracle", "echo", "sentence"] = "oracle"
    natural_length: tuple[int, int] = (64, 256)
    responses_file: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The scheduler's numbers, under vLLM's flag names."""

    max_model_len: int = 32768
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_gpu_blocks: int = 16384
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0
    reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_loras: int = 1
    async_scheduling: bool = False
    prefix_caching_hash_algo: str = "sha256"
    kv_offloading_gib: float = 0.0
    """Size of the host tier; `kv_offloading_blocks` says the same in blocks."""
    kv_offloading_blocks: int = 0
    kv_offloading_block_ns: int = 0
    kv_offloading_disk_blocks: int = 0
    """A further tier behind the host's."""
    kv_offloading_disk_block_ns: int = 0


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """What only an SGLang server has, under its own flag names and with its defaults (SGLang reference §6.1, §9)."""

    profile: str = "0.5.23"
    max_total_tokens: int = 131072
    page_size: int = 1
    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    schedule_low_priority_values_first: bool = False
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    max_queued_requests: int | None = None
    decode_log_interval: int = 40
    log_batches: bool = False
    tp_size: int = 1
    enable_metrics: bool = True
    """Off in SGLang. On here: a test bench without gauges shows nothing of what it is for."""
    enable_metrics_for_all_schedulers: bool = False
    enable_cache_report: bool = False
    incremental_streaming_output: bool = False
    weight_version: str = "default"
    admin_api_key: str | None = None
    health_generation: bool = True
    health_check_timeout_ns: int = 20 * S
    request_state_wait_ns: int = 4 * S
    req_waiting_timeout_ns: int | None = None
    req_running_timeout_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may cost the process. Every limit is listed in docs/model.md."""

    body_bytes: int = 64 * 1024 * 1024
    body_timeout_ns: int = 60 * S
    head_bytes: int = 256 * 1024
    head_timeout_ns: int = 10 * S
    write_buffer_bytes: int = 256 * 1024
    write_deadline_ns: int = 60 * S
    open_answers: int = 65536
    choices: int = 16384
    connections: int = 65536
    adapters: int = 1000
    history: int = 1000
    stored_responses: int = 1000


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `windtunnel serve` was told."""

    model: str
    engine: Engine = "vllm"
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    """None: no gRPC, or gRPC on the port of HTTP."""
    grpc_on_http_port: bool = False
    served_model_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    lora_modules: tuple[tuple[str, str], ...] = ()
    enable_lora: bool = False
    runtime_lora: bool = False
    data_parallel_size: int = 1
    seed: int = 0
    hash_seed: str | None = None
    vllm_version: str = "0.33.0"
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    dev_mode: bool = False
    enable_scale_out: bool = False
    enable_tokenizer_info_endpoint: bool = False
    profiler_config: str | None = None
    enable_server_load_tracking: bool = False
    enable_responses_store: bool = False
    disable_fastapi_docs: bool = False
    runner: Runner = "generate"
    convert: Convert | None = None
    embedding_size: int = 384
    num_labels: int = 2
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    enable_force_include_usage: bool = False
    enable_auto_tool_choice: bool = False
    enable_request_id_headers: bool = False
    enable_log_requests: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    return_tokens_as_token_ids: bool = False
    trust_request_chat_template: bool = False
    media_tokens: int = 0
    max_logprobs: int = 20
    stream_interval: int = 1
    sse_keep_alive_interval_ns: int = 0
    shutdown_timeout_ns: int = 0
    shutdown_outcome: Literal["error", "clean", "hang"] = "error"
    watchdog_ns: int = 5 * S
    keep_alive_on_engine_death: bool = False
    pod_name: str | None = None
    pod_namespace: str | None = None
    startup_ns: int = 0
    timeout_keep_alive_ns: int = 5 * S
    disable_access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    faults: tuple[str, ...] = ()
    pacing: PacingConfig = field(default_factory=PacingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    scheduler: EngineSettings = field(default_factory=EngineSettings)
    disagg: DisaggSettings = field(default_factory=DisaggSettings)
    kv_transfer: KvTransferSettings = field(default_factory=KvTransferSettings)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    limits: ServerLimits = field(default_factory=ServerLimits)
    sglang: SglangSettings = field(default_factory=SglangSettings)

    @property
    def lora(self) -> bool:
        """Adapters can be served."""
        return bool(self.lora_modules) or self.enable_lora or self.runtime_lora

    @property
    def grpc(self) -> bool:
        return self.grpc_port is not None or self.grpc_on_http_port

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.model,)


def as_json(config: Any) -> dict[str, Any]:
    """A config value as plain JSON types, nested; served by `/admin/config`."""
    out: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, Profile):
            value = value.source
        elif hasattr(value, "__dataclass_fields__"):
            value = as_json(value)
        elif item.name == "api_keys":
            value = ["***"] * len(value)
        elif item.name == "admin_api_key":
            value = value and "***"
        out[item.name] = list(value) if isinstance(value, tuple) else value
    return out


def non_default(config: ServeConfig) -> dict[str, Any]:
    """What of `as_json` is not as it is by default; printed at start, as vLLM does."""
    return _differing(as_json(config), as_json(ServeConfig(model="")))


def _differing(told: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    differing = {name: value for name, value in told.items() if value != usual.get(name)}
    return {
        name: _differing(value, usual[name]) if isinstance(value, dict) and isinstance(usual.get(name), dict) else value
        for name, value in differing.items()
    }
