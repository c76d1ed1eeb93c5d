"""What gauges and queues show once all clients have left: leaks, drift, staleness, hidden clean-ups."""

from collections.abc import Iterator

from windtunnel.lab.conservation import LEASES
from windtunnel.lab.evidence import seconds
from windtunnel.lab.outlived import (
    idle_before_deadline,
    last_leave_ns,
    still_working,
)
from windtunnel.lab.plan import Role
from windtunnel.lab.queues import clean_up, queues_of
from windtunnel.lab.record import End, StormResult
from windtunnel.lab.sampler import excess, unknown

CLEANUP_AFTER_S = 15.0
"""A queue that is up for longer, in the target's time, was not merely being drained: three times SGLang's grace."""
FULL = 0.999
"""A pool that is in use up to here cannot show that more is held."""


def slot_leak(result: StormResult) -> Iterator[str]:
    for key, line in _leak(result, "running", "other"):
        if key != "running" or not _kv_says_empty(result):
            yield line


def kv_leak(result: StormResult) -> Iterator[str]:
    return (line for _, line in _leak(result, "kv_usage"))


def queue_orphan(result: StormResult) -> Iterator[str]:
    return (line for key, line in _leak(result, "waiting", "queue") if not _of_transfer(key))


def transfer_orphan(result: StormResult) -> Iterator[str]:
    return (line for key, line in _leak(result, "queue") if _of_transfer(key))


def _of_transfer(key: str) -> bool:
    return any(part in key for part in ("inflight", "transfer", "deferred_kv"))


def _leak(result: StormResult, *watches: str) -> Iterator[tuple[str, str]]:
    """Gauge and sentence. A probe that was not answered proves nothing."""
    sample = result.after_probe
    if sample is None or still_working(result) or not _probe_answered(result):
        return
    for key, rise in excess(sample, result.baseline, result.watches).items():
        if result.watches[key] in watches:
            yield (
                key,
                f"{key} is {sample.gauges[key]:g} (baseline {result.baseline.gauges.get(key, 0):g}, {rise:+g})"
                f" {seconds(sample.at_ns - last_leave_ns(result))} after the last client left, also after a probe request",
            )


def _probe_answered(result: StormResult) -> bool:
    asked_ns = result.at_deadline.at_ns if result.at_deadline else 0
    return any(probe.end is End.FINISHED for probe in result.of(Role.PROBE) if probe.started_ns >= asked_ns)


def gauge_drift(result: StormResult) -> Iterator[str]:
    if _kv_says_empty(result):
        for key, line in _leak(result, "running"):
            yield f"{line}, but {key} requests hold no KV cache: the gauge has drifted, nothing runs"
    lowest: dict[str, float] = {}
    for sample in result.samples:
        for key in result.watches.keys() & sample.gauges.keys():
            lowest[key] = min(lowest.get(key, 0.0), sample.gauges[key])
    yield from (f"{key} went down to {value:g}: somebody was counted out twice" for key, value in lowest.items() if value < 0)


def _kv_says_empty(result: StormResult) -> bool:
    """Whether the KV usage is known, can rise, and is not the least bit above its baseline after the probe."""
    sample, base = result.after_probe, result.baseline.gauges
    if sample is None or "kv_usage" not in base:
        return False
    return sample.gauges.get("kv_usage", FULL) <= base["kv_usage"] < FULL


def stale_gauge(result: StormResult) -> Iterator[str]:
    """Up for long enough without any client that no step can be under way, and down after a probe."""
    if result.at_deadline is None or result.after_probe is None or not _probe_answered(result):
        return
    if not idle_before_deadline(result).longer_than(min(result.cancel_grace_ns, result.plan.quiet_deadline_ns // 2)):
        return
    after = excess(result.after_probe, result.baseline, result.watches)
    for key, rise in excess(result.at_deadline, result.baseline, result.watches).items():
        if key not in after and key not in unknown(result.after_probe, result.baseline):
            yield f"{key} stayed {rise:+g} above its baseline until a probe request brought it back"


def hidden_cleanup(result: StormResult) -> Iterator[str]:
    """A queue that stood long above its baseline and then drained at once: something gives up after a time of its own.

    After the deadline for quiet it was the probe that brought it back.
    """
    for queue in queues_of(result):
        if clean_up(queue, CLEANUP_AFTER_S) and not _after_deadline(result, queue.drained_at_s):
            stays = f", {queue.baseline:g} that was there before stays" if queue.baseline else ""
            yield (
                f"{queue.key} stood {queue.held or queue.peak - queue.baseline:g} above its baseline after the storm and came"
                f" back by itself {queue.drained_at_s:.0f} s after the last client had left{stays}"
            )


def _after_deadline(result: StormResult, since_leaving_s: float | None) -> bool:
    """`since_leaving_s` is in the target's time."""
    if result.at_deadline is None or since_leaving_s is None:
        return False
    quiet_s = (result.at_deadline.at_ns - last_leave_ns(result)) / 1e9 * result.plan.time_scale
    return since_leaving_s > quiet_s


def lease_expired(result: StormResult) -> Iterator[str]:
    """Between two samples; the last one that is usable counts."""
    last = next((sample for sample in reversed(result.samples) if sample.usable), None)
    if last is None:
        return
    for key in LEASES:
        rise = last.counters.get(key, 0.0) - result.baseline.counters.get(key, 0.0)
        if rise > 0:
            yield f"prefills gave up the KV of {rise:g} requests that no decode had read: it was held for the whole lease"
