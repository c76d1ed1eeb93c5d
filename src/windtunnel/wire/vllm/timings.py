"""What one live sequence has shown so far, as its metrics need it (vLLM reference §4)."""

from dataclasses import dataclass

from windtunnel.core.lifecycle import Event, Transition
from windtunnel.core.units import MS


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
