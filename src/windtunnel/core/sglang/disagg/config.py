"""What a P/D worker is told at its start, besides the engine's own settings. Defaults are SGLang 0.5.23's (reference §3.3)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from windtunnel.core.sglang.profiles import Profile, profile
from windtunnel.core.units import MS, S

FAKE_HOST = "2.2.2.2"
FAKE_ROOM = 0


@dataclass(frozen=True, slots=True)
class DisaggConfig:
    """Checked as it is made: a ValueError names the field and what it must be. A timeout of None is switched off."""

    profile: Profile = field(default_factory=profile)
    endpoints: tuple[str, ...] = ("127.0.0.1:1",)
    """ip:port of the socket of each attention-TP rank of this worker; their number is the TP size."""
    dp_rank: int = 0
    transfer_backend: Literal["sim", "fake"] = "sim"
    """`fake`: a decode worker without any prefill; a request needs no room then."""
    follow_bootstrap_room: bool = True
    """Decode finds the prefill's DP rank as room modulo DP size; otherwise the prefill registers each room."""
    transfer_queues: int = 4
    """`SGLANG_DISAGGREGATION_QUEUE_SIZE`."""
    metadata_slots: int | None = None
    """None: twice the running requests allowed."""
    kv_bytes_per_token: int = 131072
    bootstrap_timeout_ns: int = 300 * S
    """Counts only where the profile has a bootstrap timeout."""
    waiting_timeout_ns: int = 300 * S
    waiting_clock: Literal["metadata", "arrival"] = "metadata"
    transferring_timeout_ns: int | None = None
    """A limit for Transferring on the prefill; no release has one (P26)."""
    settle_timeout_ns: int = 5 * S
    deferred_release: bool | None = None
    """None: as the profile has it."""
    deferred_release_timeout_ns: int = 30 * S
    topology_interval_ns: int = S
    dp_query_interval_ns: int = 10 * MS
    """Between two questions for the same rooms. SGLang asks at every loop (P35)."""
    heartbeat_interval_ns: int = 5 * S
    heartbeat_max_failure: int = 2
    num_reserved_decode_tokens: int = 512
    retraction: Literal["cpu_tensor", "host_pool", "none"] = "cpu_tensor"
    decode_radix_cache: bool = False
    promote_gap_ns: int = 0
    """Time between a transfer worker's check of a room and its update to Transferring: more than 0 forces the race (§1.6)."""
    write_gap_ns: int = 0
    """Time inside that update, between read and write: more than 0 forces the window that is left in every release (§1.3)."""
    abort_loses_peer: bool = False
    """A locally aborted room's writes lose their peer: the decode leg of the same client goes at the same time."""
    report_while_stalled: bool = False
    """Write gauges every 30 s although requests sit in P/D queues and no batch runs. SGLang does not (§6.1)."""

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: must be at least {least}")
        if not self.endpoints:
            raise ValueError("endpoints is empty: must name one ip:port for each rank")
        for endpoint in self.endpoints:
            port_of(endpoint)

    @property
    def tp_size(self) -> int:
        return len(self.endpoints)

    @property
    def defers_release(self) -> bool:
        return self.profile.deferred_release if self.deferred_release is None else self.deferred_release


_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "dp_rank": 0,
        "transfer_queues": 1,
        "metadata_slots": 1,
        "kv_bytes_per_token": 1,
        "bootstrap_timeout_ns": 1,
        "waiting_timeout_ns": 1,
        "transferring_timeout_ns": 1,
        "settle_timeout_ns": 0,
        "deferred_release_timeout_ns": 0,
        "topology_interval_ns": 1,
        "dp_query_interval_ns": 1,
        "heartbeat_interval_ns": 1,
        "heartbeat_max_failure": 1,
        "num_reserved_decode_tokens": 0,
        "promote_gap_ns": 0,
        "write_gap_ns": 0,
    }
)


def port_of(endpoint: str) -> int:
    """The port of `ip:port`. Raises ValueError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"endpoint is {endpoint!r}: write ip:port")
    return int(port)
