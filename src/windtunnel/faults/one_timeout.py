"""Fault `one-timeout`: one time for a crash and for congestion, no lease with heartbeats (vLLM #25897, #41383)."""

from windtunnel.core.units import S, parse_duration_ns
from windtunnel.faults.kv_switch import KvSwitch


class OneTimeout(KvSwitch):
    def __init__(self, timeout_ns: int = 120 * S) -> None:
        super().__init__("one-timeout", abort_timeout_ns=timeout_ns)

    def with_option(self, text: str) -> "OneTimeout":
        return OneTimeout(parse_duration_ns(text))


FAULT = OneTimeout()
