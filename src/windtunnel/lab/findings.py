"""What a storm's result means: named findings, each with its evidence.

Every finding is one row of a table and one pure function over a `StormResult`. A function returns its evidence, one
sentence per observation, or nothing. Leaks need a storm that ran to its end and a target whose gauges are known.

Told apart: a gauge that stays up is a *leak* when a probe request leaves it there and no tokens are made meanwhile; it
is *stale* when the probe brings it back. Work for a client that has gone is `late_cancel` when something ended it, and
`zombie_tokens` when it ran to its own end or goes on at the deadline.

A finding that would not have been made without what another one has touched is its *consequence* (`causes`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from windtunnel.lab.causes import CAUSES, hung
from windtunnel.lab.conservation import LEASES, finished_beyond_clients, imbalances
from windtunnel.lab.latency import slowdowns
from windtunnel.lab.outlived import (
    Outlived,
    idle_before_deadline,
    last_gone_ns,
    last_leave_ns,
    live,
    outlived,
    still_working,
    usual_ns,
    zombie_tokens,
)
from windtunnel.lab.plan import Role
from windtunnel.lab.pulse import starved
from windtunnel.lab.queues import clean_up, queues_of
from windtunnel.lab.record import Damage, End, StormResult, StreamRecord
from windtunnel.lab.sampler import excess, unknown

EVIDENCE_LIMIT = 12
CLEANUP_AFTER_S = 15.0
"""A queue that is up for longer, in the target's time, was not merely being drained: three times SGLang's grace."""
FULL = 0.999
"""A pool that is in use up to here cannot show that more is held."""
SILENT_SHARE = 0.5
"""A stream that was given up is cut, not slow, when nothing had come for so much of its time-out."""


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
    consequence_of: str | None = None
    """The finding of the same storm that explains all of this one."""


def find(result: StormResult) -> tuple[Finding, ...]:
    """All findings of one storm, in the order of the table."""
    found = {}
    for kind in KINDS:
        evidence = list(kind.look(result))
        if evidence:
            found[kind.name] = Finding(kind.name, kind.severity, kind.cause, _shorten(evidence), len(evidence))
    explained = _explained(result, set(found))
    return tuple([replace(one, consequence_of=explained.get(one.name)) for one in found.values()])


def primary(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Those that no other one explains."""
    return tuple([one for one in findings if one.consequence_of is None])


def _explained(result: StormResult, names: set[str]) -> Mapping[str, str]:
    """Consequence → cause: what is not found any more in what the cause has left untouched."""
    out: dict[str, str] = {}
    for cause in CAUSES if len(names) > 1 else ():
        if cause.name not in names or cause.name in out:
            continue
        rest = cause.untouched(result)
        for kind in KINDS:
            open_ = kind.name in names and kind.name not in out and kind.name != cause.name
            if open_ and kind.name not in cause.never and not any(kind.look(rest)):
                out[kind.name] = cause.name
    return out


def doubts(result: StormResult) -> list[str]:
    """What could not be judged, and why: for the notes."""
    out = []
    if not result.plan.victims:
        out.append("no victims: nobody left, so nothing was tried; what was found is about plain requests only")
    seen = outlived(result)
    if seen.elapsed_ns > result.cancel_grace_ns and not seen.longer_than(result.cancel_grace_ns) and not result.after_probe:
        out.append(
            f"requests of victims were still seen {_s(seen.elapsed_ns)} after the last had left, but the samples between are"
            f" too few ({seen.samples}) or too far apart to say that they ran on; storm a machine that is less busy"
        )
    slept = [stream for stream in result.streams if _slept(result, stream)]
    if slept:
        out.append(f"{len(slept)} time-outs of requests are not judged: the lab itself was not given the time to read")
    return out


def _shorten(evidence: list[str]) -> tuple[str, ...]:
    rest = len(evidence) - EVIDENCE_LIMIT
    return tuple(evidence[:EVIDENCE_LIMIT]) + ((f"… and {rest} more",) if rest > 0 else ())


def _bystander_error(result: StormResult) -> Iterator[str]:
    hanging = {stream.ask.tag for stream in result.streams if hung(stream)}  # for `_wedged` to judge
    for one in result.bystanders:
        if one.tag in hanging or (one.status is None and starved(result.lags, one.sent_ns, one.ended_ns)):
            continue
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
        if stream.end in (End.CUT, End.UNTERMINATED, End.MALFORMED) or _fell_silent(result, stream):
            yield f"{_name(stream)}: {stream.end.value} after {len(stream.words)} words{_why(stream.error)}"


def _fell_silent(result: StormResult, stream: StreamRecord) -> bool:
    """Given up with words, long after the last of them: neither slow nor missed by a lab that slept."""
    if stream.end is not End.TIMEOUT or not stream.frame_ns:
        return False
    since_ns = stream.frame_ns[-1]
    silent_ns = stream.ended_ns - since_ns
    return silent_ns > SILENT_SHARE * (stream.ended_ns - stream.started_ns) and not _slept(result, stream)


def _slept(result: StormResult, stream: StreamRecord) -> bool:
    """Whether the lab was asleep for too much of the time-out of this request."""
    return stream.end is End.TIMEOUT and starved(result.lags, stream.started_ns, stream.ended_ns)


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
        for key in result.watches.keys() & sample.gauges.keys():
            lowest[key] = min(lowest.get(key, 0.0), sample.gauges[key])
    yield from (f"{key} went down to {value:g}: somebody was counted out twice" for key, value in lowest.items() if value < 0)


def _kv_says_empty(result: StormResult) -> bool:
    """Whether the KV usage is known, can rise, and is not the least bit above its baseline after the probe."""
    sample, base = result.after_probe, result.baseline.gauges
    if sample is None or "kv_usage" not in base:
        return False
    return sample.gauges.get("kv_usage", FULL) <= base["kv_usage"] < FULL


def _kv_leak(result: StormResult) -> Iterator[str]:
    return (line for _, line in _leak(result, "kv_usage"))


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
                f" {_s(sample.at_ns - last_leave_ns(result))} after the last client left, also after a probe request",
            )


def _probe_answered(result: StormResult) -> bool:
    asked_ns = result.at_deadline.at_ns if result.at_deadline else 0
    return any(probe.end is End.FINISHED for probe in result.of(Role.PROBE) if probe.started_ns >= asked_ns)


def _stale_gauge(result: StormResult) -> Iterator[str]:
    """Up for long enough without any client that no step can be under way, and down after a probe."""
    if result.at_deadline is None or result.after_probe is None or not _probe_answered(result):
        return
    if not idle_before_deadline(result).longer_than(min(result.cancel_grace_ns, result.plan.quiet_deadline_ns // 2)):
        return
    after = excess(result.after_probe, result.baseline, result.watches)
    for key, rise in excess(result.at_deadline, result.baseline, result.watches).items():
        if key not in after and key not in unknown(result.after_probe, result.baseline):
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
    """Nothing ended it but itself, or nothing has ended it yet."""
    if not last_gone_ns(result) or result.interrupted:
        return
    if still_working(result):
        assert result.at_deadline is not None
        after = _s(result.at_deadline.at_ns - last_gone_ns(result))
        yield f"tokens were still being made for nobody {after} after the last client had gone, when the wait for quiet ended"
    ran_out = finished_beyond_clients(result)
    made = zombie_tokens(result)
    if made and (still_working(result) or ran_out is None or ran_out > 0):
        yield (
            f"{made:g} tokens were generated while no client was connected,"
            f" more than {_s(result.cancel_grace_ns)} after the last one had gone"
        )
    elif ran_out and _late(result):
        yield f"{ran_out:g} more requests were counted as finished than clients saw finish: they ran to their end"


def _late(result: StormResult) -> Outlived | None:
    """How long requests outlived their clients, where that is longer than the grace, and neither a leak nor a stale gauge."""
    seen = outlived(result)
    return seen if seen.longer_than(result.cancel_grace_ns) and not result.after_probe else None


def _late_cancel(result: StormResult) -> Iterator[str]:
    return iter(()) if _router_to_blame(result) else _freed_late(result)


def _freed_late(result: StormResult) -> Iterator[str]:
    late = _late(result)
    if late is None or result.interrupted or any(_work_for_nobody(result)):
        return
    yield (
        f"{late.samples} samples show requests of victims at work, the last {_s(late.elapsed_ns)} after all had gone"
        f" (at least {_s(late.witnessed_ns)} for certain); {_s(result.cancel_grace_ns)} are allowed"
    )


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
    if later and all(_failed(stream) or _stood_still(result, stream) for stream in later):
        yield f"none of {len(later)} later streams was served: {dict(Counter(stream.end.value for stream in later))}"
        return
    for stream in result.of(Role.PROBE, Role.CALM, Role.SURVIVOR, Role.RETRY, Role.BYSTANDER, Role.LATER):
        if hung(stream) and not _slept(result, stream):
            yield f"{_name(stream)}: {stream.end.value}{_why(stream.error)}"


def _stood_still(result: StormResult, stream: StreamRecord) -> bool:
    """From its start or in its middle: where a wedge falls among the later streams is chance."""
    return _fell_silent(result, stream) or (hung(stream) and not _slept(result, stream))


def _failed(stream: StreamRecord) -> bool:
    return stream.end is End.ERROR_STATUS and (stream.status or 0) >= 500


def _survivor_slowdown(result: StormResult) -> Iterator[str]:
    """Against streams of the same shape in rounds without victims."""
    return iter(slowdowns(result))


def _cancel_miscounted(result: StormResult) -> Iterator[str]:
    return iter(imbalances(result))


def _lease_expired(result: StormResult) -> Iterator[str]:
    """Between two samples; the last one that is usable counts."""
    last = next((sample for sample in reversed(result.samples) if sample.usable), None)
    if last is None:
        return
    for key in LEASES:
        rise = last.counters.get(key, 0.0) - result.baseline.counters.get(key, 0.0)
        if rise > 0:
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
    held_ns, before, most = 0, None, 0.0
    for sample in (sample for sample in result.samples if sample.phase == "storm" and sample.usable):
        at_work = live(result, sample)
        over = 0.0 if at_work is None else at_work - sample.clients
        held_ns = held_ns + min(sample.at_ns - before.at_ns, usual_ns(result)) if before is not None and over > 0 else 0
        before = sample if over > 0 else None
        most = max(most, over)
        if held_ns > result.cancel_grace_ns:
            yield f"for over {_s(result.cancel_grace_ns)} up to {most:g} more requests were at work than clients were waiting"
            return


def _hidden_cleanup(result: StormResult) -> Iterator[str]:
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
