"""What a vLLM engine with a KV connector is told at its start (vLLM reference §7.1, §7.2). Names and defaults are vLLM's.

Those of Mooncake are from the source of 0.33.0: `mooncake_connector.py` and `envs.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Literal

from windtunnel.core.units import S

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
ROLES: tuple[Role, ...] = ("kv_producer", "kv_consumer", "kv_both")
FailurePolicy = Literal["fail", "recompute"]
FAILURE_POLICIES: tuple[FailurePolicy, ...] = ("fail", "recompute")

PULL, PUSH, MOONCAKE = "NixlConnector", "NixlPushConnector", "MooncakeConnector"
Mode = Literal["pull", "push", "mooncake"]
CONNECTORS: Mapping[str, Mode] = MappingProxyType(
    {PULL: "pull", "NixlPullConnector": "pull", PUSH: "push", MOONCAKE: "mooncake"}
)
"""The connectors that exist here, and how blocks go: the decode reads, the prefill writes, or it writes when it is asked to."""


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """Checked as it is made: a ValueError names the field and what it must be. Times are the engine's own (`scaled`)."""

    engine_id: str
    connector: str = PULL
    role: Role = "kv_both"
    """NIXL does not look at it: what a request is for stands in its own parameters. It decides which gauges there are.
    Mooncake asserts that no request is for the other role."""
    side_channel_host: str = "localhost"
    """`VLLM_NIXL_SIDE_CHANNEL_HOST`: what this engine tells others."""
    side_channel_port: int = 5600
    """`VLLM_NIXL_SIDE_CHANNEL_PORT` plus the data-parallel index. Mooncake: where this engine is written to."""
    load_failure_policy: FailurePolicy = "fail"
    lease_ns: int = 30 * S
    """`kv_lease_duration`. Heartbeats go out every sixth of it; each extends by two thirds."""
    abort_timeout_ns: int | None = None
    """Instead of a lease with heartbeats: `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` of releases before #41383 (480 s).
    Mooncake has nothing else: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`."""
    num_workers: int = 10
    """Mooncake: threads that write. Twice as many pulls wait or are written at once, and further ones stand behind them."""
    pull_margin_ns: int = 60 * S
    """Mooncake: a decode waits for an answer so much longer than a prefill waits for its request."""
    bootstrap_server_address: str = ""
    """Mooncake: a bootstrap server that runs elsewhere, as host:port."""
    kv_recompute_threshold: int = 64
    """Fewer tokens than that are not worth a pull from a decode node (`bidirectional_kv_xfer`)."""
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl_ns: int = 480 * S
    expiry_margin_ns: int = 5 * S
    """A decode's blocks are not read any more so shortly before they expire."""
    enforce_handshake_compat: bool = True
    free_on_abort: bool = False
    """Before vLLM #32255: an abort frees the blocks at once, and the transfer writes into whoever has them by then."""
    forget_on_abort: bool = False
    """As vllm-ascend #16662: the end of an aborted request's transfer is not noticed, and its blocks stay for good."""
    ordered_reaper: bool = False
    """vLLM #58222: leases are looked at from the oldest on, up to the first that has not run out."""
    die_of_late_load: bool = False
    """vLLM #43226, #46240: the end of an aborted request's transfer finds no request, and an assertion ends the engine."""
    ignore_heartbeats: bool = False
    """As vLLM #53095: heartbeats come and no lease is renewed by them."""
    notify_own_id: bool = False
    """vLLM #36958: the prefill is told the decode's id of the request, which it does not know."""
    refusals_tell_nobody: bool = False
    """A request that the front end refuses leaves its prefill to the lease, whatever API it came by."""
    compatibility_hash: str = ""
    """`compatibility_hash(...)`."""
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    kv_bytes_per_token: int = 131072
    descriptors_per_block: int = 32
    """Layers: the transport moves each block of each layer by itself."""

    def __post_init__(self) -> None:
        for name, allowed in _ONE_OF.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}: must be a whole number, at least {least}")
        if not self.engine_id:
            raise ValueError("engine_id is empty: must name the engine")
        if not 0 < self.side_channel_port < 65536:
            raise ValueError(f"side_channel_port is {self.side_channel_port}: must be 1 to 65535")
        if self.bidirectional_kv_xfer and self.pushes:
            raise ValueError(f"bidirectional_kv_xfer is not supported by {PUSH}")
        if self.mooncake:
            self._check_mooncake()

    def _check_mooncake(self) -> None:
        if self.abort_timeout_ns is None:
            raise ValueError(f"abort_timeout_ns is None: {MOONCAKE} has no leases, so it must be a time")
        for name in _NIXL_ONLY:
            if getattr(self, name):
                raise ValueError(f"{name} is not supported by {MOONCAKE}")

    @property
    def pushes(self) -> bool:
        return CONNECTORS[self.connector] == "push"

    @property
    def mooncake(self) -> bool:
        return CONNECTORS[self.connector] == "mooncake"

    @property
    def consumes(self) -> bool:
        return self.role != "kv_producer"

    @property
    def beat_ns(self) -> int | None:
        """Between two heartbeats; None for releases without any."""
        return None if self.abort_timeout_ns is not None else max(1, self.lease_ns // 6)

    @property
    def extension_ns(self) -> int:
        return self.lease_ns * 2 // 3

    @property
    def hold_ns(self) -> int:
        """How long blocks are kept for a reader of whom nothing is heard."""
        return self.lease_ns if self.abort_timeout_ns is None else self.abort_timeout_ns

    def scaled(self, time_scale: float) -> "KvTransferConfig":
        """The same with all times divided by `time_scale`."""
        names = [name for name in self.__slots__ if name.endswith("_ns") and getattr(self, name) is not None]
        return replace(self, **{name: max(1, round(getattr(self, name) / time_scale)) for name in names})


_ONE_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"connector": tuple(CONNECTORS), "role": ROLES, "load_failure_policy": FAILURE_POLICIES}
)
_NIXL_ONLY = ("bidirectional_kv_xfer", "ordered_reaper", "ignore_heartbeats", "notify_own_id")
_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "lease_ns": 1,
        "abort_timeout_ns": 1,
        "kv_recompute_threshold": 0,
        "decoder_kv_blocks_ttl_ns": 1,
        "expiry_margin_ns": 0,
        "num_workers": 1,
        "pull_margin_ns": 0,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "kv_bytes_per_token": 1,
        "descriptors_per_block": 1,
    }
)


def compatibility_hash(*, model: str, version: str, block_size: int, kv_bytes_per_token: int, mode: str) -> str:
    """What two engines must share before blocks move between them: model, release, layout, direction (reference §7.2).

    Which facts vLLM hashes, and how, is not in the reference: the digest is ours.
    """
    facts = (model, version, block_size, kv_bytes_per_token, mode)
    return sha256("\0".join(map(str, facts)).encode()).hexdigest()
