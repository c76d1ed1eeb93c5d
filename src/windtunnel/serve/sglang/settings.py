"""What a P/D worker is told on the command line, parsed once (SGLang reference §3.3, §11.2). Times as SGLang has them."""

from dataclasses import dataclass, replace
from typing import Literal

from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.profiles import NEWEST, Profile, profile
from windtunnel.core.units import US, S

Mode = Literal["null", "prefill", "decode"]
TransferBackend = Literal["sim", "fake", "nixl"]
"""`nixl`: as `sim`, and a few real bytes for each page."""
HEARTBEAT_LEAST_NS = 2 * S
"""A shorter interval counts as this one, and less than 1 failure as 1."""


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """`--disaggregation-…` and what goes with it. Nothing here is divided by the time scale yet."""

    mode: Mode = "null"
    transfer_backend: TransferBackend = "sim"
    bootstrap_port: int = 8998
    profile: str = NEWEST
    status_rule: str | None = None
    """None: as the profile has it."""
    load_balance_method: str = "follow_bootstrap_room"
    queue_size: int = 4
    bootstrap_timeout_ns: int = 300 * S
    waiting_timeout_ns: int = 300 * S
    heartbeat_interval_ns: int = 5 * S
    heartbeat_max_failure: int = 2
    zmq_send_timeout_ns: int = S
    entry_cleanup_ns: int = 120 * S
    deferred_release: bool | None = None
    """None: as the profile has it."""
    deferred_release_timeout_ns: int = 30 * S
    transferring_timeout_ns: int | None = None
    num_reserved_decode_tokens: int = 512
    decode_radix_cache: bool = False
    metadata_slots: int | None = None
    listen_sockets: int = 1
    bandwidth_gb_s: float = 10.0
    transfer_latency_ns: int = 100 * US
    dead_peer_ns: int = 30 * S
    fates: tuple[tuple[str, float], ...] = ()
    """(fate, share of the posted writes); the rest is `ok`."""
    nixl_block_bytes: int = 64
    """Real bytes for each page with `nixl`."""
    report_while_stalled: bool = False

    @property
    def on(self) -> bool:
        return self.mode != "null"


def profile_of(settings: DisaggSettings) -> Profile:
    """Raises ValueError for a release that is not described."""
    chosen = profile(settings.profile)
    return chosen if settings.status_rule is None else replace(chosen, status_rule=settings.status_rule)


def core_config(settings: DisaggSettings, endpoints: tuple[str, ...], dp_rank: int, time_scale: float) -> DisaggConfig:
    """What the worker gets: every duration divided by `time_scale`."""

    def scaled(ns: int) -> int:
        return max(1, round(ns / time_scale))

    limit_ns = settings.transferring_timeout_ns
    return DisaggConfig(
        profile=profile_of(settings),
        endpoints=endpoints,
        dp_rank=dp_rank,
        transfer_backend="fake" if settings.transfer_backend == "fake" else "sim",
        follow_bootstrap_room=settings.load_balance_method == "follow_bootstrap_room",
        transfer_queues=settings.queue_size,
        metadata_slots=settings.metadata_slots,
        bootstrap_timeout_ns=scaled(settings.bootstrap_timeout_ns),
        waiting_timeout_ns=scaled(settings.waiting_timeout_ns),
        transferring_timeout_ns=None if limit_ns is None else scaled(limit_ns),
        settle_timeout_ns=scaled(5 * S),
        deferred_release=settings.deferred_release,
        deferred_release_timeout_ns=scaled(settings.deferred_release_timeout_ns),
        topology_interval_ns=scaled(S),
        dp_query_interval_ns=10_000_000,
        heartbeat_interval_ns=scaled(max(HEARTBEAT_LEAST_NS, settings.heartbeat_interval_ns)),
        heartbeat_max_failure=max(1, settings.heartbeat_max_failure),
        num_reserved_decode_tokens=settings.num_reserved_decode_tokens,
        decode_radix_cache=settings.decode_radix_cache,
        report_while_stalled=settings.report_while_stalled,
    )
