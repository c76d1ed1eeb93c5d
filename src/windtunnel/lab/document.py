"""A storm as a JSON document: what experiments, reports and CI read. Plain dictionaries; the schema is in `schema/`."""

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import windtunnel
from windtunnel.lab.client_findings import is_gone
from windtunnel.lab.connection import How
from windtunnel.lab.finding import Finding
from windtunnel.lab.findings import doubts, find
from windtunnel.lab.latency import spread
from windtunnel.lab.outlived import freed_after_ns, zombie_tokens
from windtunnel.lab.plan import Role, StormPlan
from windtunnel.lab.queues import queue_documents
from windtunnel.lab.record import Sample, StormResult, StreamRecord
from windtunnel.lab.redact import redact, secrets_of
from windtunnel.lab.target import Target

LEAK_KEYS = ("running", "waiting", "kv_usage")
SERIES_LIMIT = 4_000


def storm_document(result: StormResult) -> dict[str, Any]:
    """All of a storm that a reader needs, times in seconds from its start."""
    return {
        "engine_kind": result.kind,
        "server": dict(result.server),
        "oracle": result.oracle,
        "victims": _victims(result),
        "bystanders": _bystanders(result),
        "survivors": _streams(result.of(Role.SURVIVOR)),
        "calm": _streams(result.of(Role.CALM)),
        "retries": _streams(result.of(Role.RETRY)),
        "later_streams": _streams(result.of(Role.LATER)),
        "leaked": _leaked(result),
        "quiet_s": _seconds(result.quiet_ns),
        "freed_after_s": _seconds(freed_after_ns(result)),
        "zombie_tokens": zombie_tokens(result),
        "baseline": {"gauges": dict(result.baseline.gauges)},
        "series": _series(result.samples),
        "queues": queue_documents(result),
        "counters": _counters(result),
        "process": _process(result.samples),
        "direct": asdict(result.direct) if result.direct else None,
        "drain": _drain(result),
        "clients": _clients(result),
        "phases": [
            {"name": phase.name, "start_s": _seconds(phase.started_ns), "end_s": _seconds(phase.ended_ns)}
            for phase in result.phases
        ],
        "events": _events(result),
        "findings": finding_documents(find(result)),
        "interrupted": result.interrupted,
        "untried": result.untried,
        "notes": [*result.notes, *doubts(result)],
    }


def storm_report(target: Target, result: StormResult, *, reproduce: str | None = None) -> dict[str, Any]:
    """The document of one storm by itself, with keys and personal data removed; schema `storm.schema.json`."""
    started_at = datetime.now(UTC) - timedelta(microseconds=max((phase.ended_ns for phase in result.phases), default=0) / 1e3)
    document = {
        "format": 1,
        "started_at": started_at.isoformat(timespec="seconds"),
        "target": target.origin.url,
        "model": target.model,
        "metrics_urls": [url.shown for url in target.metrics],
        **storm_document(result),
        "storm": plan_document(result.plan),
        "versions": versions(),
        "environment": environment(),
        **({"reproduce": reproduce} if reproduce else {}),
    }
    cleaned: dict[str, Any] = redact(document, secrets_of(target.headers))
    return cleaned


def plan_document(plan: StormPlan) -> dict[str, Any]:
    """The effective plan, as plain values."""
    return {key: _plain(value) for key, value in asdict(plan).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def versions() -> dict[str, str]:
    system = f"{platform.system()} {platform.machine()}"
    return {"windtunnel": windtunnel.__version__, "python": platform.python_version(), "system": system}


def environment() -> dict[str, str]:
    """The machine that the storm was sent from; no names of hosts or people."""
    return {"kernel": platform.release(), "cpus": str(os.cpu_count()), "implementation": platform.python_implementation()}


def finding_documents(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "severity": one.severity.value,
            "usual_cause": one.cause,
            "count": one.count,
            "evidence": list(one.evidence),
            "consequence_of": one.consequence_of,
        }
        for one in findings
    ]


def _victims(result: StormResult) -> dict[str, Any]:
    victims = result.of(Role.VICTIM)
    return {
        "sent": len(victims),
        "left": sum(victim.left_ns is not None for victim in victims),
        "left_in": dict(Counter(victim.left_in for victim in victims if victim.left_in)),
        "left_by": dict(Counter(victim.left_by for victim in victims if victim.left_by)),
        "by_end": dict(Counter(victim.end.value for victim in victims)),
        "late_ms_max": _late_ms(victims),
    }


def _clients(result: StormResult) -> dict[str, Any]:
    lost = [
        {"name": one.name, "why": one.why, "at_s": _seconds(one.at_ns), "requests": one.requests} for one in result.lost_clients
    ]
    return {"processes": result.plan.clients, "on": result.plan.on, "lost": lost}


def _late_ms(victims: tuple[StreamRecord, ...]) -> float | None:
    """The longest time from the state in which a victim leaves to its leaving, stalls apart."""
    late = [
        (victim.left_ns - victim.due_ns) / 1e6
        for victim in victims
        if victim.left_ns is not None and victim.due_ns is not None and victim.left_by != How.STOP_READING.value
    ]
    return round(max(late), 3) if late else None


def _process(samples: tuple[Sample, ...]) -> dict[str, dict[str, float]]:
    """First, last and highest value of each fact of the server's process."""
    rows = [sample.process for sample in samples if sample.process]
    return {
        key: {"first": rows[0][key], "last": rows[-1].get(key, 0.0), "max": max(row.get(key, 0.0) for row in rows)}
        for key in (rows[0] if rows else ())
    }


def _drain(result: StormResult) -> dict[str, Any] | None:
    drain = result.drain
    if drain is None:
        return None
    return {
        "streams": drain.streams,
        "unended": drain.unended,
        "by_end": dict(drain.by_end),
        "exited_s": _seconds(drain.exited_ns),
        "exited": int(drain.exited_ns is not None),
    }


def _bystanders(result: StormResult) -> dict[str, Any]:
    statuses = Counter(str(one.status) if one.status is not None else "none" for one in result.bystanders)
    return {
        "sent": len(result.bystanders),
        "non_200": sum(one.status != 200 for one in result.bystanders),
        "harmed": sum(one.harmed for one in result.bystanders),
        "by_status": dict(sorted(statuses.items())),
    }


def _streams(streams: tuple[StreamRecord, ...]) -> dict[str, Any]:
    complete = sum(stream.complete for stream in streams)
    return {
        "sent": len(streams),
        "complete": complete,
        "lost": len(streams) - complete,
        "by_end": dict(Counter(stream.end.value for stream in streams)),
        **spread(streams)._asdict(),
        "text_faults": dict(Counter(stream.fault.damage.value for stream in streams if stream.fault)),
    }


def _leaked(result: StormResult) -> dict[str, float | None]:
    """Gauges above their baseline at the end: after the probe where one was needed; None where there is no such gauge.

    A storm that became quiet has leaked nothing, whatever ran later. Of a server that is gone nothing is known.
    """
    keys = [*LEAK_KEYS, *(key for key, watch in result.watches.items() if watch in ("queue", "other"))]
    base = result.baseline.gauges
    end = result.final
    if result.quiet_ns is not None:
        return {key: 0.0 if key in base else None for key in keys}
    if end is None or is_gone(result):
        return dict.fromkeys(keys, None)
    return {key: round(end.gauges[key] - base[key], 6) if key in base and key in end.gauges else None for key in keys}


def _counters(result: StormResult) -> dict[str, float]:
    """By how much each counter rose during the storm."""
    usable = [sample for sample in result.samples if sample.usable]
    last: Mapping[str, float] = usable[-1].counters if usable else {}
    return {key: value - result.baseline.counters.get(key, 0.0) for key, value in last.items()}


def _series(samples: tuple[Sample, ...]) -> list[dict[str, Any]]:
    """The samples, thinned to at most `SERIES_LIMIT`."""
    every = -(-len(samples) // SERIES_LIMIT) or 1
    return [
        {
            "t_s": _seconds(sample.at_ns),
            "phase": sample.phase,
            "clients": sample.clients,
            "gauges": dict(sample.gauges),
            **({"error": sample.error} if sample.error else {}),
        }
        for sample in samples[::every]
    ]


def _events(result: StormResult) -> list[dict[str, Any]]:
    """What a time line shows besides the gauges: victims leaving, bystanders and later streams ending."""
    out: list[dict[str, Any]] = [
        {"t_s": _seconds(stream.left_ns), "what": "left", "detail": stream.left_in}
        for stream in result.of(Role.VICTIM)
        if stream.left_ns
    ]
    out += [
        {"t_s": _seconds(one.ended_ns), "what": "bystander", "kind": one.kind, "status": one.status, "ok": not one.harmed}
        for one in result.bystanders
    ]
    out += [
        {"t_s": _seconds(stream.ended_ns), "what": stream.ask.role.value, "end": stream.end.value, "ok": stream.complete}
        for stream in result.of(Role.LATER, Role.SURVIVOR)
    ]
    return sorted(out, key=lambda event: float(event["t_s"]))


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else round(ns / 1e9, 6)
