"""What became of each queue after a storm: polled at a fixed interval, and whether, and when, it drained.

Times are the target's: real seconds times the time scale, from the moment the last victim left.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.lab.plan import StormPlan
from windtunnel.lab.record import Sample, StormResult

QUEUE_WATCHES = ("queue", "other")


@dataclass(frozen=True, slots=True)
class Queue:
    """One gauge. `polls` hold what it said at each interval after the storm, as far as there are samples."""

    key: str
    baseline: float
    peak: float
    polls: tuple[float, ...]
    drained_at_s: float | None
    """When it was back at its baseline for good; 0 if it never was above; None: it still is."""
    residual: float
    """How far the last sample is above the baseline."""

    @property
    def held(self) -> float | None:
        """Above the baseline at the first poll."""
        return self.polls[0] - self.baseline if self.polls else None

    def document(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "peak": self.peak,
            "polls": list(self.polls),
            "held": self.held,
            "highest_poll": max(self.polls, default=None),
            "drained_at_s": None if self.drained_at_s is None else round(self.drained_at_s, 3),
            "residual": self.residual,
        }


def queues_of(result: StormResult) -> list[Queue]:
    """One for each watched queue that the target has."""
    keys = [key for key, watch in result.watches.items() if watch in QUEUE_WATCHES and key in result.baseline.gauges]
    left_ns = [stream.left_ns for stream in result.streams if stream.left_ns is not None]
    samples = [sample for sample in result.samples if sample.usable]
    return [_queue(key, result, samples, max(left_ns)) for key in keys] if left_ns and samples else []


def _queue(key: str, result: StormResult, samples: list[Sample], left_ns: int) -> Queue:
    base = result.baseline.gauges[key]
    known = [sample for sample in samples if sample.at_ns >= result.baseline.at_ns and key in sample.gauges]
    values = [(sample.at_ns, sample.gauges[key]) for sample in known] or [(result.baseline.at_ns, base)]
    above = [at for at, (_, value) in enumerate(values) if value > base]
    residual = values[-1][1] - base
    drained: float | None = 0.0
    if above and above[-1] == len(values) - 1:
        drained = None
    elif above:
        drained = max(0, values[above[-1] + 1][0] - left_ns) / 1e9 * result.plan.time_scale
    return Queue(key, base, max(value for _, value in values), _polls(values, result.plan, left_ns), drained, residual)


def _polls(values: list[tuple[int, float]], plan: StormPlan, left_ns: int) -> tuple[float, ...]:
    dues = [left_ns + number * plan.poll_every_ns for number in range(1, plan.polls + 1)]
    found = [next((value for at_ns, value in values if at_ns >= due), None) for due in dues]
    return tuple(value for value in found if value is not None)


def clean_up(queue: Queue, threshold_s: float) -> bool:
    """The queue stood above its baseline for longer than the threshold and then drained by itself."""
    held = queue.held if queue.held is not None else queue.peak - queue.baseline
    return held > 0 and queue.drained_at_s is not None and queue.drained_at_s > threshold_s


def queue_documents(result: StormResult) -> Mapping[str, Any]:
    return {queue.key: queue.document() for queue in queues_of(result)}
