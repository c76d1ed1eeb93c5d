"""The network: how long a message takes from client to router and from router to engine, and back."""

from random import Random

from windtunnel.core.units import S
from windtunnel.sim.scenario import NetworkSpec

HEAD_BYTES = 512
"""Request line, headers and JSON around the prompt; of an answer: status line and headers."""
PROMPT_TOKEN_BYTES = 4
FRAME_BYTES = 256
"""One SSE frame of one token."""


class Network:
    """Delays in nanoseconds; one draw of jitter for each message."""

    def __init__(self, spec: NetworkSpec, draws: Random) -> None:
        self._spec = spec
        self._draws = draws
        self._byte_ns = 8 * S / (spec.bandwidth_mbit * 1e6)

    def client_router_ns(self, size_bytes: int) -> int:
        return self._one_way(self._spec.client_router, size_bytes)

    def router_engine_ns(self, size_bytes: int) -> int:
        return self._one_way(self._spec.router_engine, size_bytes)

    def engine_engine_ns(self, size_bytes: int) -> int:
        return self._one_way(self._spec.engine_engine, size_bytes)

    @property
    def health_interval_ns(self) -> int:
        return self._spec.health_interval

    @property
    def queued_ns(self) -> int:
        """When a request has surely been queued at its engine, counted from its sending."""
        return self._spec.client_router + self._spec.router_engine + 4 * self._spec.jitter + 1

    def _one_way(self, latency_ns: int, size_bytes: int) -> int:
        jitter = self._draws.expovariate(1 / self._spec.jitter) if self._spec.jitter else 0.0
        return latency_ns + round(size_bytes * self._byte_ns + jitter)


def request_bytes(prompt_tokens: int) -> int:
    return HEAD_BYTES + PROMPT_TOKEN_BYTES * prompt_tokens
