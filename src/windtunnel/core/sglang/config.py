"""What an SGLang engine is told at its start. Names and defaults are SGLang 0.5.23's where it has them (reference §6.1, §9)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from windtunnel.core.units import S

POLICIES = (
    "fcfs",
    "lpm",
    "random",
    "dfs-weight",
    "lof",
    "priority",
    "routing-key",
    "hrrn",
    "shortest-prefill-first",
)


@dataclass(frozen=True, slots=True)
class SglangEngineConfig:
    """Checked as it is made: a ValueError names the field and what it must be."""

    max_total_num_tokens: int = 131072
    """Tokens of the KV pool; whole pages are used."""
    page_size: int = 1
    context_length: int = 32768
    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    """-1: prompts are never cut."""
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    low_priority_first: bool = False
    """Under `priority` smaller values run first."""
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    overlap: bool = False
    """Plan a step before the results of the one before are known (`--disable-overlap-schedule` is its absence)."""
    max_queued_requests: int | None = None
    """Ignored in P/D."""
    decode_log_interval: int = 40
    idle_report_ns: int = 30 * S
    req_waiting_timeout_ns: int | None = None
    req_running_timeout_ns: int | None = None
    eos_token_id: int | None = None
    extra_eos_token_ids: frozenset[int] = frozenset()
    collect_kv_events: bool = False

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: must be at least {least}")
        if self.schedule_policy not in POLICIES:
            raise ValueError(f"schedule_policy is {self.schedule_policy!r}: must be one of {', '.join(POLICIES)}")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < self.page_size:
            raise ValueError(f"chunked_prefill_size is {self.chunked_prefill_size}: must be -1 or at least page_size")
        if self.num_pages < 2:
            raise ValueError(f"max_total_num_tokens is {self.max_total_num_tokens}: must hold at least 2 pages")
        if self.schedule_conservativeness <= 0:
            raise ValueError(f"schedule_conservativeness is {self.schedule_conservativeness}: must be above 0")

    @property
    def num_pages(self) -> int:
        return self.max_total_num_tokens // self.page_size

    @property
    def capacity(self) -> int:
        """Tokens in whole pages."""
        return self.num_pages * self.page_size

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request together: a page stays free, and so does the context's last place."""
        return min(self.context_length - 1, self.capacity - self.page_size)

    @property
    def input_bound(self) -> int:
        """A prompt must be shorter (SGLang 0.5.23, `max_req_input_len`)."""
        return self.max_request_tokens - 5


_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "page_size": 1,
        "context_length": 2,
        "max_running_requests": 1,
        "max_prefill_tokens": 1,
        "max_queued_requests": 0,
        "decode_log_interval": 1,
        "idle_report_ns": 1,
        "req_waiting_timeout_ns": 1,
        "req_running_timeout_ns": 1,
    }
)

LIVE_FIELDS = frozenset(
    {
        "max_running_requests",
        "max_prefill_tokens",
        "max_queued_requests",
        "decode_log_interval",
        "req_waiting_timeout_ns",
        "req_running_timeout_ns",
    }
)
"""What `SglangEngine.reconfigure` may change while requests run."""
