"""The series of a KV connector. Help texts are ours.

NIXL: vLLM reference §4.1, §4.4. Mooncake: `mooncake/stats.py` of vLLM 0.33.0.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from windtunnel.core.outputs import StepStats
from windtunnel.core.vllm.connector.config import Mode
from windtunnel.wire.metrics import MetricSpec, Store

LABELS = ("model_name", "engine")
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")

_POST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_DESCRIPTOR_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)

_Buckets = tuple[float, ...]
_BYTES_BUCKETS: _Buckets = tuple(2**power for power in range(11, 34, 2))
_TRANSFERS: Mapping[str, tuple[str, _Buckets]] = MappingProxyType(
    {
        "xfer_time_seconds": ("Duration of each KV transfer", _POST_BUCKETS[1:]),
        "bytes_transferred": ("Bytes of each KV transfer", _BYTES_BUCKETS),
        "num_descriptors": ("Descriptors of each KV transfer", _DESCRIPTOR_BUCKETS),
    }
)
"""What both have: stem → help, buckets. The bounds of the times are those of vLLM 0.33.0 (`nixl/stats.py`)."""
_NIXL_HISTOGRAMS: Mapping[str, tuple[str, _Buckets]] = MappingProxyType(
    {
        "nixl_xfer_time_seconds": _TRANSFERS["xfer_time_seconds"],
        "nixl_post_time_seconds": ("Time to post each KV transfer; not observed here", _POST_BUCKETS),
        "nixl_bytes_transferred": _TRANSFERS["bytes_transferred"],
        "nixl_num_descriptors": _TRANSFERS["num_descriptors"],
    }
)
_NIXL_COUNTERS = MappingProxyType(
    {
        "nixl_num_failed_transfers": "KV transfers, handshakes and notifications that failed",
        "nixl_num_failed_notifications": "Notifications that could not be sent",
        "nixl_num_kv_expired_reqs": "Requests whose KV expired before everybody had read it",
        "nixl_num_notifications_after_expiry": "Notifications about KV that was not held any more",
    }
)
_MOONCAKE_HISTOGRAMS = MappingProxyType({f"mooncake_{stem}": told for stem, told in _TRANSFERS.items()})
"""Observed by the prefill, which writes."""
_MOONCAKE_COUNTERS = MappingProxyType(
    {
        "mooncake_num_failed_transfers": "Writes that failed (prefill)",
        "mooncake_num_failed_recvs": "Pulls that failed (decode)",
        "mooncake_num_kv_expired_reqs": "Requests whose KV nobody has pulled in time (prefill)",
    }
)
_SERIES: Mapping[Mode, tuple[Mapping[str, tuple[str, _Buckets]], Mapping[str, str]]] = MappingProxyType(
    {
        "pull": (_NIXL_HISTOGRAMS, _NIXL_COUNTERS),
        "push": (_NIXL_HISTOGRAMS, _NIXL_COUNTERS),
        "mooncake": (_MOONCAKE_HISTOGRAMS, _MOONCAKE_COUNTERS),
    }
)


class ConnectorMetrics:
    """Owned by a `VllmMetrics`. Counters and gauges move with a step, as all of vLLM's do."""

    def __init__(self, store: Store, model: str, ranks: Sequence[int], kv_role: str, mode: Mode) -> None:
        told_histograms, told_counters = _SERIES[mode]
        histograms = {
            stem: store.histograms(MetricSpec(f"vllm:{stem}", "histogram", text, LABELS, buckets))
            for stem, (text, buckets) in told_histograms.items()
        }
        counters = {
            stem: store.values(MetricSpec(f"vllm:{stem}", "counter", text, LABELS)) for stem, text in told_counters.items()
        }
        self._histograms = {
            (rank, stem): family.child(model, str(rank)) for stem, family in histograms.items() for rank in ranks
        }
        self._values = {(rank, stem): family.child(model, str(rank)) for stem, family in counters.items() for rank in ranks}
        if kv_role != "kv_producer":
            self._add_stages(store, model, ranks)

    def _add_stages(self, store: Store, model: str, ranks: Sequence[int]) -> None:
        text = "Requests whose KV comes from elsewhere, by how far that is"
        spec = MetricSpec("vllm:num_requests_kv_fetch_by_stage", "gauge", text, (*LABELS, "stage"))
        family = store.values(spec)
        for rank in ranks:
            for stage in STAGES:
                self._values[rank, f"kv_fetch_{stage}"] = family.child(model, str(rank), stage)

    def on_stats(self, rank: int, stats: StepStats) -> None:
        """The engine counts from its start on, so a counter takes its number over."""
        for stem, number in stats.extra.items():
            child = self._values.get((rank, stem))
            if child is not None:
                child.value = number

    def on_transfers(self, rank: int, observations: Iterable[tuple[str, float]]) -> None:
        for stem, value in observations:
            self._histograms[rank, stem].observe(value)
