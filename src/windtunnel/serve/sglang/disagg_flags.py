"""The flags of P/D workers: SGLang's own, its environment switches as flags, and the knobs of the simulated transfer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from windtunnel.core.transfer.status import RULES
from windtunnel.serve import flag_values as values
from windtunnel.serve.flag import Flag
from windtunnel.serve.transfer import parse_fates

_REAL_BACKENDS = ("mooncake", "mori", "ascend")


def _backend(value: Any) -> str:
    if value in _REAL_BACKENDS:
        other = "sim models it, nixl moves a few bytes of it, fake needs no peer"
        raise ValueError(f"{value!r} moves real memory, which a simulator does not have: {other}")
    return values.choice("sim", "fake", "nixl")(value)  # type: ignore[no-any-return]


def _off(value: Any) -> int | None:
    return None if value in (None, "none", "off") else values.seconds(value)


_POSITIVE = values.integer(1)
_SWITCH: dict[str, Any] = {"parse": values.boolean, "switch": True}

DISAGG_FLAGS: tuple[Flag, ...] = (
    Flag("disaggregation-mode", "disagg.mode", values.choice("null", "prefill", "decode"), "what kind of worker this is"),
    Flag(
        "disaggregation-transfer-backend",
        "disagg.transfer_backend",
        _backend,
        "sim, nixl (with real bytes) or fake (decode without a peer)",
    ),
    Flag(
        "disaggregation-bootstrap-port",
        "disagg.bootstrap_port",
        values.integer(0, 65535),
        "port of a prefill's bootstrap server; 0 picks a free one",
    ),
    Flag(
        "load-balance-method",
        "disagg.load_balance_method",
        values.choice("follow_bootstrap_room", "round_robin", "total_requests", "total_tokens"),
        "how a decode finds the prefill's DP rank: from the room, or by asking",
    ),
    Flag("num-reserved-decode-tokens", "disagg.num_reserved_decode_tokens", values.integer(0), "kept free per request"),
    Flag("disaggregation-decode-enable-radix-cache", "disagg.decode_radix_cache", help="prefix cache on a decode", **_SWITCH),
    Flag("disaggregation-queue-size", "disagg.queue_size", values.integer(1, 1024), "transfer worker queues of a rank"),
    Flag("disaggregation-bootstrap-timeout", "disagg.bootstrap_timeout_ns", values.seconds, "prefill in Bootstrapping"),
    Flag("disaggregation-waiting-timeout", "disagg.waiting_timeout_ns", values.seconds, "decode in WaitingForInput"),
    Flag("disaggregation-heartbeat-interval", "disagg.heartbeat_interval_ns", values.seconds, "between two heartbeats"),
    Flag("disaggregation-heartbeat-max-failure", "disagg.heartbeat_max_failure", _POSITIVE, "misses until it is lost"),
    Flag("disaggregation-zmq-send-timeout", "disagg.zmq_send_timeout_ns", values.seconds, "decode to prefill"),
    Flag(
        "disaggregation-bootstrap-entry-cleanup-interval",
        "disagg.entry_cleanup_ns",
        values.seconds,
        "how long a room's DP rank is kept",
    ),
    Flag(
        "disaggregation-deferred-decode-kv-release",
        "disagg.deferred_release",
        values.optional(values.boolean),
        "keep pages until the prefill has stopped writing; default: as the release",
    ),
    Flag(
        "disaggregation-deferred-decode-kv-release-timeout",
        "disagg.deferred_release_timeout_ns",
        values.seconds,
        "at most so long",
    ),
    Flag("disaggregation-transferring-timeout", "disagg.transferring_timeout_ns", _off, "no release has one"),
    Flag("disaggregation-status-rule", "disagg.status_rule", values.choice(*RULES), "instead of the release's"),
    Flag("disaggregation-metadata-slots", "disagg.metadata_slots", _POSITIVE, "default: twice the rows"),
    Flag(
        "disaggregation-listen-sockets",
        "disagg.listen_sockets",
        values.integer(1, 120),
        "sockets of a decode rank: it stands for so many, whose rooms spread over the prefill's transfer queues",
    ),
    Flag("disaggregation-report-while-stalled", "disagg.report_while_stalled", help="gauges every 30 s in a stall", **_SWITCH),
    Flag("transfer-bandwidth", "disagg.bandwidth_gb_s", values.number(1e-9, 1e6), "10^9 bytes a second"),
    Flag("transfer-latency", "disagg.transfer_latency_ns", values.duration, "of each write"),
    Flag("transfer-dead-peer", "disagg.dead_peer_ns", values.duration, "until the transport reports a peer that has gone"),
    Flag("nixl-block-bytes", "disagg.nixl_block_bytes", values.integer(1, 1 << 20), "real bytes of a page, with nixl (64)"),
    Flag("transfer-fates", "disagg.fates", parse_fates, "shares of writes that stall, fail or lose their peer: stall=0.01"),
)

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "disaggregation-bootstrap-timeout",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "disaggregation-waiting-timeout",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "disaggregation-heartbeat-interval",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "disaggregation-heartbeat-max-failure",
        "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT": "disaggregation-zmq-send-timeout",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL": "disaggregation-bootstrap-entry-cleanup-interval",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "disaggregation-deferred-decode-kv-release",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "disaggregation-deferred-decode-kv-release-timeout",
        "SGLANG_DISAGGREGATION_QUEUE_SIZE": "disaggregation-queue-size",
    }
)
"""SGLang's switches and the flags that they are here (reference §3.3)."""
