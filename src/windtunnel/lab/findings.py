"""What a storm's result means: named findings, each with its evidence.

Every finding is one row of a table and one pure function over a `StormResult`. A function returns its evidence, one
sentence per observation, or nothing. Leaks need a storm that ran to its end and a target whose gauges are known.

Told apart: a gauge that stays up is a *leak* when a probe request leaves it there and no tokens are made meanwhile; it
is *stale* when the probe brings it back. Work for a client that has gone is `late_cancel` when something ended it, and
`zombie_tokens` when it ran to its own end or goes on at the deadline.

A finding that would not have been made without what another one has touched is its *consequence* (`causes`).
"""

from collections.abc import Mapping
from dataclasses import replace

from windtunnel.lab import client_findings, gauge_findings, leaving_findings
from windtunnel.lab.causes import CAUSES
from windtunnel.lab.evidence import seconds, slept
from windtunnel.lab.finding import EVIDENCE_LIMIT, Finding, FindingKind, Severity
from windtunnel.lab.outlived import outlived
from windtunnel.lab.record import StormResult

KINDS: tuple[FindingKind, ...] = (
    FindingKind(
        "bystander_error",
        Severity.HIGH,
        "a task that outlives its handler writes into an object that serves someone else",
        client_findings.bystander_error,
    ),
    FindingKind(
        "crossed_stream",
        Severity.HIGH,
        "two requests share a buffer, an id or a KV block, so one gets the other's words",
        client_findings.crossed_stream,
    ),
    FindingKind(
        "corrupt_stream",
        Severity.HIGH,
        "output is lost, repeated or overwritten between engine and socket",
        client_findings.corrupt_stream,
    ),
    FindingKind(
        "unterminated_stream",
        Severity.HIGH,
        "an exception ends the body without error frame and terminator",
        client_findings.unterminated_stream,
    ),
    FindingKind(
        "hidden_error",
        Severity.MEDIUM,
        "the head leaves before the request has been checked by the engine",
        client_findings.hidden_error,
    ),
    FindingKind(
        "collateral_abort",
        Severity.HIGH,
        "ids are matched by prefix or shared, or one abort ends a whole batch",
        client_findings.collateral_abort,
    ),
    FindingKind(
        "abort_not_propagated",
        Severity.HIGH,
        "the router drops its client and keeps its own connection to the worker",
        leaving_findings.abort_not_propagated,
    ),
    FindingKind(
        "slot_leak",
        Severity.HIGH,
        "the abort is lost or overwritten, so the request is never removed",
        gauge_findings.slot_leak,
    ),
    FindingKind(
        "kv_leak",
        Severity.HIGH,
        "blocks are not freed on the abort path, or are freed only with their request",
        gauge_findings.kv_leak,
    ),
    FindingKind(
        "queue_orphan",
        Severity.HIGH,
        "an abort reaches the running list only, or a later state overwrites its failure",
        gauge_findings.queue_orphan,
    ),
    FindingKind(
        "transfer_orphan",
        Severity.HIGH,
        "a late transfer status overwrites the failure, or nobody tells the peer that the request has gone",
        gauge_findings.transfer_orphan,
    ),
    FindingKind(
        "gauge_drift",
        Severity.MEDIUM,
        "a counter of live requests is not paired on every way out of them",
        gauge_findings.gauge_drift,
    ),
    FindingKind(
        "hidden_cleanup",
        Severity.MEDIUM,
        "requests that nobody can end wait for the transport to report a dead peer, which then fails them all",
        gauge_findings.hidden_cleanup,
    ),
    FindingKind(
        "stale_gauge",
        Severity.LOW,
        "gauges are written only when a step runs, and no step follows the abort",
        gauge_findings.stale_gauge,
    ),
    FindingKind("zombie_tokens", Severity.HIGH, "nobody tells the engine that the client has gone", leaving_findings.ran_on),
    FindingKind(
        "late_cancel",
        Severity.MEDIUM,
        "the disconnect is noticed only by polling or by a failed write",
        leaving_findings.late_cancel,
    ),
    FindingKind(
        "survivor_slowdown",
        Severity.MEDIUM,
        "cleaning up after those who left blocks the loop or the scheduler that serves the others",
        leaving_findings.survivor_slowdown,
    ),
    FindingKind(
        "cancel_miscounted",
        Severity.LOW,
        "a request that was cancelled is counted twice, as a success, or not at all",
        leaving_findings.cancel_miscounted,
    ),
    FindingKind(
        "lease_expired",
        Severity.MEDIUM,
        "a client that leaves between prefill and decode: the decode request is not sent, and only a decode releases a prefill",
        gauge_findings.lease_expired,
    ),
    FindingKind(
        "retry_storm_amplified",
        Severity.HIGH,
        "attempts that were given up run on beside their retries",
        leaving_findings.retry_storm_amplified,
    ),
    FindingKind(
        "drain_timeout",
        Severity.HIGH,
        "shutting down waits for streams or connections without a limit",
        client_findings.drain_timeout,
    ),
    FindingKind(
        "unreachable", Severity.HIGH, "the server has crashed, or was stopped by somebody", client_findings.unreachable
    ),
    FindingKind("wedged", Severity.HIGH, "a lock, slot or worker is held by a request that has gone", client_findings.wedged),
)


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
            f"requests of victims were still seen {seconds(seen.elapsed_ns)} after the last had left, but the samples between"
            f" are too few ({seen.samples}) or too far apart to say that they ran on; storm a machine that is less busy"
        )
    missed = [stream for stream in result.streams if slept(result, stream)]
    if missed:
        out.append(f"{len(missed)} time-outs of requests are not judged: the lab itself was not given the time to read")
    return out


def _shorten(evidence: list[str]) -> tuple[str, ...]:
    rest = len(evidence) - EVIDENCE_LIMIT
    return tuple(evidence[:EVIDENCE_LIMIT]) + ((f"… and {rest} more",) if rest > 0 else ())
