"""From the server's settings to what each SGLang engine is told."""

from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.core.units import S
from windtunnel.serve.config import ServeConfig

_IDLE_REPORT_NS = 30 * S


def sglang_engine_config(config: ServeConfig, tokenizer: Tokenizer | None = None) -> SglangEngineConfig:
    """Raises ValueError for a limit that cannot be."""
    settings, scale = config.sglang, config.pacing.time_scale
    return SglangEngineConfig(
        max_total_num_tokens=settings.max_total_tokens,
        page_size=settings.page_size,
        context_length=config.scheduler.max_model_len,
        max_running_requests=settings.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        schedule_policy=settings.schedule_policy,
        low_priority_first=settings.schedule_low_priority_values_first,
        schedule_conservativeness=settings.schedule_conservativeness,
        disable_radix_cache=settings.disable_radix_cache,
        overlap=not settings.disable_overlap_schedule,
        max_queued_requests=settings.max_queued_requests,
        decode_log_interval=settings.decode_log_interval,
        idle_report_ns=scaled(_IDLE_REPORT_NS, scale),
        req_waiting_timeout_ns=_optional(settings.req_waiting_timeout_ns, scale),
        req_running_timeout_ns=_optional(settings.req_running_timeout_ns, scale),
        eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
        collect_kv_events=config.kv_events.publishes,
    )


def scaled(duration_ns: int, time_scale: float) -> int:
    """A delay of the real server in this server's time."""
    return max(1, round(duration_ns / time_scale))


def _optional(duration_ns: int | None, time_scale: float) -> int | None:
    return None if duration_ns is None else scaled(duration_ns, time_scale)
