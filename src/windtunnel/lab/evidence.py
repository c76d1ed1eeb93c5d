"""Words and tests that the looks for findings share."""

from windtunnel.lab.plan import Role
from windtunnel.lab.pulse import starved
from windtunnel.lab.record import End, StormResult, StreamRecord

SILENT_SHARE = 0.5
"""A stream that was given up is cut, not slow, when nothing had come for so much of its time-out."""


def unrelated(result: StormResult) -> tuple[StreamRecord, ...]:
    return result.of(Role.PROBE, Role.CALM, Role.SURVIVOR, Role.RETRY, Role.KNOWN, Role.LATER)


def owner(result: StormResult, tag: int | None) -> str:
    return next((named(stream) for stream in result.streams if stream.ask.tag == tag), f"request {tag}")


def named(stream: StreamRecord) -> str:
    return f"{stream.ask.role.value} [wt:{stream.ask.tag:x}] sent at {seconds(stream.started_ns)}"


def why(error: str | None) -> str:
    return f" ({error})" if error else ""


def seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"


def slept(result: StormResult, stream: StreamRecord) -> bool:
    """Whether the lab was asleep for too much of the time-out of this request."""
    return stream.end is End.TIMEOUT and starved(result.lags, stream.started_ns, stream.ended_ns)


def fell_silent(result: StormResult, stream: StreamRecord) -> bool:
    """Given up with words, long after the last of them: neither slow nor missed by a lab that slept."""
    if stream.end is not End.TIMEOUT or not stream.frame_ns:
        return False
    since_ns = stream.frame_ns[-1]
    silent_ns = stream.ended_ns - since_ns
    return silent_ns > SILENT_SHARE * (stream.ended_ns - stream.started_ns) and not slept(result, stream)
