"""What a storm's result means: named findings, each with its evidence.

Every finding is one row of a table and one pure function over a `StormResult`. A function returns its evidence, one
sentence per observation, or nothing. Leaks need a storm that ran to its end and a target whose gauges are known.

Told apart: a gauge that stays up is a *leak* when a probe request leaves it there and no tokens are made meanwhile; it
is *stale* when the probe brings it back; and when tokens are still being made it is work for a client that has gone
(`zombie_tokens`, `late_cancel`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from windtunnel.core.units import MS
from windtunnel.lab.conservation import LEASES, imbalances
from windtunnel.lab.latency import slowdowns
from windtunnel.lab.plan import Role
from windtunnel.lab.queues import clean_up, queues_of
from windtunnel.lab.record import Damage, End, Sample, StormResult, StreamRecord
from windtunnel.lab.sampler import KV_TOLERANCE
from windtunnel.lab.target import GENERATION_TOKENS

EVIDENCE_LIMIT = 12
CLEANUP_AFTER_S = 15.0
"""A queue that is up for longer, in the target's time, was not merely being drained: three times SGLang's grace."""
GAUGE_LAG_NS = 100 * MS
"""Gauges are written with a step; so much later than the truth they may be."""


class Severity(Enum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class FindingKind:
    name: str
    severity: Severity
    cause: str
    """The usual cause, in one line."""
    look: Callable[[StormResult], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    severity: Severity
    cause: str
    evidence: tuple[str, ...]
    """At most `EVIDENCE_LIMIT` sentences, then how many more there were."""
    count: int


def find(result: StormResult) -> tuple[Finding, ...]:
    """All findings of one storm, in the order of the table."""
    out = []
    for kind in KINDS:
        evidence = list(kind.look(result))
        if evidence:
            out.append(Finding(kind.name, kind.severity, kind.cause, _shorten(evidence), len(evidence)))
    return tuple(out)


def _shorten(evidence: list[str]) -> tuple[str, ...]:
    rest = len(evidence) - EVIDENCE_LIMIT
    return tuple(evidence[:EVIDENCE_LIMIT]) + ((f"… and {rest} more",) if rest > 0 else ())


def _bystander_error(result: StormResult) -> Iterator[str]:
    for one in result.bystanders:
        if one.status != one.expect_status or (one.error and not one.fault):
            got = "no status" if one.status is None else f"status {one.status}"
            yield f"{one.kind} at {_s(one.sent_ns)}: {got} instead of {one.expect_status}{_why(one.error)}"
    for stream in _unrelated(result):
        if stream.end is End.ERROR_STATUS:
            yield f"{_name(stream)}: status {stream.status} instead of 200{_why(stream.error)}"
    for sample in result.samples:
        if sample.status not in (200, None):
            yield f"metrics sample at {_s(sample.at_ns)}: status {sample.status} instead of 200"


def _crossed_stream(result: StormResult) -> Iterator[str]:
    for stream in result.streams:
        fault = stream.fault
        if fault is not None and fault.damage is Damage.FOREIGN:
            yield f"{_name(stream)}: word {fault.position} is {fault.have!r}, which belongs to {_owner(result, fault.owner)}"


def _corrupt_stream(result: StormResult) -> Iterator[str]:
    for stream in result.streams:
        if stream.end is End.EMPTY and stream.ask.role is not Role.VICTIM:
            yield f"{_name(stream)}: an empty answer under status {stream.status}{_why(stream.error)}"
        fault = stream.fault
        if fault is not None and fault.damage is not Damage.FOREIGN:
            got = f"{fault.have!r} instead of {fault.want!r}" if fault.have else f"nothing, {fault.want!r} is due"
            if stream.finish_reason == "abort":
                continue
            yield f"{_name(stream)}: {fault.damage.value} at word {fault.position} of {stream.ask.max_tokens}: {got}"

    for pair in result.known:
        if pair.before != pair.after:
            at = next((at for at, (one, two) in enumerate(zip(pair.before, pair.after, strict=False)) if one != two), None)
            where = f"from word {at}" if at is not None else f"in length ({len(pair.after)} words, before {len(pair.before)})"
            yield f"known answer [wt:{pair.tag:x}], alike twice before the storm, differs after it {where}"


def _unterminated_stream(result: StormResult) -> Iterator[str]:
    for stream in _unrelated(result):
        if stream.end in (End.CUT, End.UNTERMINATED, End.MALFORMED) or (stream.end is End.TIMEOUT and stream.words):
            yield f"{_name(stream)}: {stream.end.value} after {len(stream.words)} words{_why(stream.error)}"


def _hidden_error(result: StormResult) -> Iterator[str]:
    for stream in _unrelated(result):
        if stream.end is End.ERROR_FRAME:
            yield f"{_name(stream)}: an error under status {stream.status}{_why(stream.error)}"


def _slot_leak(result: StormResult) -> Iterator[str]:
    for key, line in _leak(result, "running", "other"):
        if key != "running" or not _kv_says_empty(result):
            yield line


def _queue_orphan(result: StormResult) -> Iterator[str]:
    return (line for key, line in _leak(result, "waiting", "queue") if not _of_transfer(key))


def _transfer_orphan(result: StormResult) -> Iterator[str]:
    return (line for key, line in _leak(result, "queue") if _of_transfer(key))


def _of_transfer(key: str) -> bool:
    return any(part in key for part in ("inflight", "transfer", "deferred_kv"))


def _gauge_drift(result: StormResult) -> Iterator[str]:
    if _kv_says_empty(result):
        for key, line in _leak(result, "running"):
            yield f"{line}, but {key} requests hold no KV cache: the gauge has drifted, nothing runs"
    lowest: dict[str, float] = {}
    for sample in result.samples:
        for key in result.watches:
            lowest[key] = min(lowest.get(key, 0.0), sample.gauges.get(key, 0.0))
    yield from (f"{key} went down to {value:g}: somebody was counted out twice" for key, value in lowest.items() if value < 0)


def _kv_says_empty(result: StormResult) -> bool:
    """Whether the KV usage is known, and is not the least bit above its baseline after the probe."""
    sample, base = result.after_probe, result.baseline.gauges
    return sample is not None and "kv_usage" in base and sample.gauges.get("kv_usage", 0.0) <= base["kv_usage"]


def _kv_leak(result: StormResult) -> Iterator[str]:
    return (line for _, line in _leak(result, "kv_usage"))


def _leak(result: StormResult, *watches: str) -> Iterator[tuple[str, str]]:
    """Gauge and sentence. A probe that was not answered proves nothing."""
    sample = result.after_probe
    if sample is None or _still_working(result) or not _probe_answered(result):
        return
    for key, rise in _over(result, sample).items():
        if result.watches[key] in watches:
            yield (
                key,
                f"{key} is {sample.gauges[key]:g} (baseline {result.baseline.gauges.get(key, 0):g}, {rise:+g})"
                f" {_s(sample.at_ns - last_leave_ns(result))} after the last client left, also after a probe request",
            )


def _probe_answered(result: StormResult) -> bool:
    asked_ns = result.at_deadline.at_ns if result.at_deadline else 0
    return any(probe.end is End.FINISHED for probe in result.of(Role.PROBE) if probe.started_ns >= asked_ns)


def _stale_gauge(result: StormResult) -> Iterator[str]:
    if result.at_deadline is None or result.after_probe is None:
        return
    after = _over(result, result.after_probe)
    for key, rise in _over(result, result.at_deadline).items():
        if key not in after:
            yield f"{key} stayed {rise:+g} above its baseline until a probe request brought it back"


def _abort_not_propagated(result: StormResult) -> Iterator[str]:
    """Behind a router, work for nobody is the router's when the worker frees a client that leaves it directly."""
    if _router_to_blame(result):
        assert result.direct is not None and result.direct.freed_ns is not None
        direct = f"asked directly, {result.direct.source} freed a request {_s(result.direct.freed_ns)} after its client left"
        for line in (*_work_for_nobody(result), *_freed_late(result)):
            yield f"{line}; {direct}"


def _router_to_blame(result: StormResult) -> bool:
    direct = result.direct
    return direct is not None and direct.freed_ns is not None and direct.freed_ns <= result.cancel_grace_ns


def _collateral_abort(result: StormResult) -> Iterator[str]:
    for stream in result.of(Role.PROBE, Role.SURVIVOR, Role.LATER, Role.BYSTANDER, Role.CALM, Role.RETRY, Role.KNOWN):
        if stream.finish_reason == "abort":
            yield f"{_name(stream)}: ended as aborted after {len(stream.words)} words, and its client had not left"


def _zombie_tokens(result: StormResult) -> Iterator[str]:
    return iter(()) if _router_to_blame(result) else _work_for_nobody(result)


def _work_for_nobody(result: StormResult) -> Iterator[str]:
    made = zombie_tokens(result)
    if made:
        yield (
            f"{made:g} tokens were generated while no client was connected,"
            f" more than {_s(result.cancel_grace_ns)} after the last one had gone"
        )


def _late_cancel(result: StormResult) -> Iterator[str]:
    return iter(()) if _router_to_blame(result) else _freed_late(result)


def _freed_late(result: StormResult) -> Iterator[str]:
    left_ns = last_leave_ns(result)
    if not left_ns or result.interrupted:
        return
    freed_ns = freed_after_ns(result)
    if freed_ns is None and _still_working(result):
        yield f"still running {_s(result.samples[-1].at_ns - left_ns)} after the last victim left"
    elif freed_ns is not None and freed_ns > result.cancel_grace_ns and not result.after_probe:
        yield f"requests of victims ran on for {_s(freed_ns)}; {_s(result.cancel_grace_ns)} are allowed"


def is_gone(result: StormResult) -> bool:
    """Whether the server accepts no connection at the end: every later stream, or else the last request, was refused."""
    asked = result.of(Role.LATER) or tuple(sorted(result.streams, key=lambda one: one.started_ns)[-1:])
    return result.drain is None and bool(asked) and all(stream.end is End.REFUSED for stream in asked)


def _unreachable(result: StormResult) -> Iterator[str]:
    if is_gone(result):
        refused = sum(stream.end is End.REFUSED for stream in result.streams)
        yield f"the server no longer accepts connections: {refused} requests were refused, the last ones among them"


def _wedged(result: StormResult) -> Iterator[str]:
    if is_gone(result):
        return
    later = result.of(Role.LATER)
    if later and all(_hung(stream) or _failed(stream) for stream in later):
        yield f"none of {len(later)} later streams was served: {dict(Counter(stream.end.value for stream in later))}"
        return
    for stream in result.of(Role.PROBE, Role.SURVIVOR, Role.RETRY, Role.BYSTANDER, Role.LATER):
        if _hung(stream):
            yield f"{_name(stream)}: {stream.end.value}{_why(stream.error)}"


def _failed(stream: StreamRecord) -> bool:
    return stream.end is End.ERROR_STATUS and (stream.status or 0) >= 500


def _hung(stream: StreamRecord) -> bool:
    """Not one word within the time-out, or nobody there."""
    return stream.end is End.REFUSED or (stream.end is End.TIMEOUT and not stream.words)


def _survivor_slowdown(result: StormResult) -> Iterator[str]:
    """Against streams of the same shape before the storm: gaps after the last victim has left, and first tokens afterwards."""
    return iter(slowdowns(result))


def _cancel_miscounted(result: StormResult) -> Iterator[str]:
    return iter(imbalances(result))


def _lease_expired(result: StormResult) -> Iterator[str]:
    """Between two samples; the last one that is usable counts."""
    last = next((sample for sample in reversed(result.samples) if sample.usable and LEASES in sample.counters), None)
    if last is not None and (rise := last.counters[LEASES] - result.baseline.counters.get(LEASES, 0.0)) > 0:
        yield f"prefills gave up the KV of {rise:g} requests that no decode had read: it was held for the whole lease"


def _drain_timeout(result: StormResult) -> Iterator[str]:
    drain = result.drain
    if drain is None:
        return
    if drain.exited_ns is None:
        yield f"the process was still there {_s(drain.deadline_ns)} after SIGTERM with {drain.streams} streams open"
    if drain.unended:
        after = _s(drain.exited_ns or drain.deadline_ns)
        yield f"{drain.unended} of {drain.streams} streams had not ended {after} after SIGTERM"


def _retry_storm_amplified(result: StormResult) -> Iterator[str]:
    """With retries, more work than there are clients, for longer than the grace: attempts given up run beside their retries."""
    if not any(stream.left_by == "timeout-retry" for stream in result.streams):
        return
    since_ns, most = None, 0.0
    for sample in result.samples:
        if sample.phase != "storm" or not sample.usable:
            continue
        over = _live(result, sample) - sample.clients
        since_ns = None if over <= 0 else sample.at_ns if since_ns is None else since_ns
        most = max(most, over)
        if since_ns is not None and sample.at_ns - since_ns > result.cancel_grace_ns:
            yield f"for over {_s(result.cancel_grace_ns)} up to {most:g} more requests were at work than clients were waiting"
            return


def _hidden_cleanup(result: StormResult) -> Iterator[str]:
    """A queue that stood long above its baseline and then drained at once: something gives up after a time of its own."""
    for queue in queues_of(result):
        if clean_up(queue, CLEANUP_AFTER_S):
            stays = f", {queue.baseline:g} that was there before stays" if queue.baseline else ""
            yield (
                f"{queue.key} stood {queue.held or queue.peak - queue.baseline:g} above its baseline after the storm and came"
                f" back by itself {queue.drained_at_s:.0f} s after the last client had left{stays}"
            )


KINDS: tuple[FindingKind, ...] = (
    FindingKind(
        "bystander_error",
        Severity.HIGH,
        "a task that outlives its handler writes into an object that serves someone else",
        _bystander_error,
    ),
    FindingKind(
        "crossed_stream",
        Severity.HIGH,
        "two requests share a buffer, an id or a KV block, so one gets the other's words",
        _crossed_stream,
    ),
    FindingKind(
        "corrupt_stream", Severity.HIGH, "output is lost, repeated or overwritten between engine and socket", _corrupt_stream
    ),
    FindingKind(
        "unterminated_stream",
        Severity.HIGH,
        "an exception ends the body without error frame and terminator",
        _unterminated_stream,
    ),
    FindingKind(
        "hidden_error", Severity.MEDIUM, "the head leaves before the request has been checked by the engine", _hidden_error
    ),
    FindingKind(
        "collateral_abort",
        Severity.HIGH,
        "ids are matched by prefix or shared, or one abort ends a whole batch",
        _collateral_abort,
    ),
    FindingKind(
        "abort_not_propagated",
        Severity.HIGH,
        "the router drops its client and keeps its own connection to the worker",
        _abort_not_propagated,
    ),
    FindingKind("slot_leak", Severity.HIGH, "the abort is lost or overwritten, so the request is never removed", _slot_leak),
    FindingKind(
        "kv_leak", Severity.HIGH, "blocks are not freed on the abort path, or are freed only with their request", _kv_leak
    ),
    FindingKind(
        "queue_orphan",
        Severity.HIGH,
        "an abort reaches the running list only, or a later state overwrites its failure",
        _queue_orphan,
    ),
    FindingKind(
        "transfer_orphan",
        Severity.HIGH,
        "a late transfer status overwrites the failure, or nobody tells the peer that the request has gone",
        _transfer_orphan,
    ),
    FindingKind(
        "gauge_drift", Severity.MEDIUM, "a counter of live requests is not paired on every way out of them", _gauge_drift
    ),
    FindingKind(
        "hidden_cleanup",
        Severity.MEDIUM,
        "requests that nobody can end wait for the transport to report a dead peer, which then fails them all",
        _hidden_cleanup,
    ),
    FindingKind(
        "stale_gauge", Severity.LOW, "gauges are written only when a step runs, and no step follows the abort", _stale_gauge
    ),
    FindingKind("zombie_tokens", Severity.HIGH, "nobody tells the engine that the client has gone", _zombie_tokens),
    FindingKind("late_cancel", Severity.MEDIUM, "the disconnect is noticed only by polling or by a failed write", _late_cancel),
    FindingKind(
        "survivor_slowdown",
        Severity.MEDIUM,
        "cleaning up after those who left blocks the loop or the scheduler that serves the others",
        _survivor_slowdown,
    ),
    FindingKind(
        "cancel_miscounted",
        Severity.LOW,
        "a request that was cancelled is counted twice, as a success, or not at all",
        _cancel_miscounted,
    ),
    FindingKind(
        "lease_expired",
        Severity.MEDIUM,
        "a client that leaves between prefill and decode: the decode request is not sent, and only a decode releases a prefill",
        _lease_expired,
    ),
    FindingKind(
        "retry_storm_amplified",
        Severity.HIGH,
        "attempts that were given up run on beside their retries",
        _retry_storm_amplified,
    ),
    FindingKind(
        "drain_timeout", Severity.HIGH, "shutting down waits for streams or connections without a limit", _drain_timeout
    ),
    FindingKind("unreachable", Severity.HIGH, "the server has crashed, or was stopped by somebody", _unreachable),
    FindingKind("wedged", Severity.HIGH, "a lock, slot or worker is held by a request that has gone", _wedged),
)


def last_leave_ns(result: StormResult) -> int:
    """When the last victim left; 0 when none did."""
    return max((stream.left_ns for stream in result.streams if stream.left_ns is not None), default=0)


def freed_after_ns(result: StormResult) -> int | None:
    """From the last victim's leaving to the first sample whose running and waiting are all accounted for.

    Requests of ours that are open count as theirs. Where that was too kind, because samples without any client still
    show work for longer than gauges lag behind, it is the first sample after those.
    """
    left_ns = last_leave_ns(result)
    samples = [sample for sample in result.samples if sample.at_ns >= left_ns and sample.usable]
    if result.at_deadline is not None:
        samples = [sample for sample in samples if sample.at_ns <= result.at_deadline.at_ns]
    busy = _busy_without_clients(result, samples)
    for at, sample in enumerate(samples):
        if at > busy and _live(result, sample) <= sample.clients:
            return sample.at_ns - left_ns
    return None


def _live(result: StormResult, sample: Sample) -> float:
    base = result.baseline.gauges
    return sum(sample.gauges.get(key, 0) - base.get(key, 0) for key in ("running", "waiting"))


def _busy_without_clients(result: StormResult, samples: list[Sample]) -> int:
    """The index of the last sample of the last run of such samples that is longer than the lag; -1 when there is none."""
    last, since_ns = -1, None
    for at, sample in enumerate(samples):
        if sample.clients or _live(result, sample) <= 0:
            since_ns = None
            continue
        since_ns = sample.at_ns if since_ns is None else since_ns
        if sample.at_ns - since_ns >= GAUGE_LAG_NS:
            last = at
    return last


def zombie_tokens(result: StormResult) -> float:
    """Tokens generated between samples that saw no client, later than the grace after the last one was seen."""
    made, idle_since_ns = 0.0, None
    usable = [sample for sample in result.samples if sample.usable and GENERATION_TOKENS in sample.counters]
    for before, after in pairwise(usable):
        if before.clients or after.clients or before.opened != after.opened:
            idle_since_ns = None
            continue
        idle_since_ns = before.at_ns if idle_since_ns is None else idle_since_ns
        if before.at_ns - idle_since_ns >= result.cancel_grace_ns:
            made += max(0.0, after.counters[GENERATION_TOKENS] - before.counters[GENERATION_TOKENS])
    return made


def _still_working(result: StormResult) -> bool:
    """Whether tokens were being made for nobody at the deadline: in the second half of the idle samples before it."""
    if result.at_deadline is None:
        return False
    idle: list[Sample] = []
    for sample in result.samples:
        if sample.at_ns > result.at_deadline.at_ns:
            break
        if idle and (sample.clients or sample.opened != idle[-1].opened):
            idle = []
        if sample.usable and not sample.clients:
            idle.append(sample)
    made = [sample.counters.get(GENERATION_TOKENS, 0.0) for sample in idle[len(idle) // 2 :]]
    return len(made) > 1 and made[-1] > made[0]


def _over(result: StormResult, sample: Sample) -> dict[str, float]:
    out = {}
    for key, watch in result.watches.items():
        rise = sample.gauges.get(key, 0.0) - result.baseline.gauges.get(key, 0.0)
        if rise > (KV_TOLERANCE if watch == "kv_usage" else 0.0):
            out[key] = rise
    return out


def _unrelated(result: StormResult) -> tuple[StreamRecord, ...]:
    return result.of(Role.PROBE, Role.CALM, Role.SURVIVOR, Role.RETRY, Role.KNOWN, Role.LATER)


def _owner(result: StormResult, tag: int | None) -> str:
    return next((_name(stream) for stream in result.streams if stream.ask.tag == tag), f"request {tag}")


def _name(stream: StreamRecord) -> str:
    return f"{stream.ask.role.value} [wt:{stream.ask.tag:x}] sent at {_s(stream.started_ns)}"


def _why(error: str | None) -> str:
    return f" ({error})" if error else ""


def _s(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"
