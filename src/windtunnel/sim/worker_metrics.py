"""The metrics that a prefill or decode worker counts and observes by itself, folded as the live server folds them."""

from collections import Counter
from collections.abc import Mapping

from windtunnel.core.sglang.disagg.worker import DisaggWorker
from windtunnel.wire.sglang.metrics import SglangMetrics

COUNTERS: Mapping[str, str] = {
    "num_bootstrap_failed_reqs_total": "num_bootstrap_failed_reqs",
    "num_transfer_failed_reqs_total": "num_transfer_failed_reqs",
    "decode_deferred_kv_release_total": "decode_deferred_kv_release",
}
"""The worker's names and those of the families."""


class WorkerMetrics:
    """What has been told of one worker. Owned by the fabric."""

    def __init__(self) -> None:
        self._worker: DisaggWorker | None = None
        self._told: Counter[str] = Counter()

    def fold(self, worker: DisaggWorker, metrics: object) -> None:
        """Observations are taken in any case, so that they do not heap up. A new process counts from 0."""
        observations = worker.take_observations()
        if not isinstance(metrics, SglangMetrics):
            return
        if worker is not self._worker:
            self._worker, self._told = worker, Counter()
        for name, value in observations:
            metrics.observe(0, name, value)
        for key, count in worker.counters(0).items():
            name, _, label = key.partition(":")
            if name in COUNTERS and count != self._told[key]:
                metrics.count(0, COUNTERS[name], count - self._told[key], *([label] if label else []))
                self._told[key] = count
