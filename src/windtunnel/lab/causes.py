"""Which findings explain others: what each of them has touched, as a storm without it.

A row says what of a storm its finding leaves untouched. Another finding that is not made any more in that rest was seen through
the same defect: it is a consequence. Rows come in the order in which they explain; a consequence explains nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from windtunnel.lab.plan import Role
from windtunnel.lab.record import BystanderRecord, Damage, End, Sample, StormResult, StreamRecord

_MARKED = 24
"""So many characters of an error's text tell it from another."""


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    untouched: Callable[[StormResult], StormResult]
    why: str
    never: frozenset[str] = frozenset()
    """What it does not explain, although it is seen through the same gauges."""


def hung(stream: StreamRecord) -> bool:
    """Not one word within the time-out, or nobody there."""
    return stream.end is End.REFUSED or (stream.end is End.TIMEOUT and not stream.words)


def _while_served(result: StormResult) -> StormResult:
    """Without what ended while nobody was served: from the first request that hung to the last, and after the last answer."""
    hanging = [stream for stream in result.streams if hung(stream) and stream.ask.role is not Role.VICTIM]
    since_ns = min((stream.started_ns for stream in hanging), default=0)
    until_ns = max((stream.ended_ns for stream in hanging), default=0)
    last_ns = max((stream.ended_ns for stream in result.streams if stream.complete), default=0)

    def served(ended_ns: int) -> bool:
        return ended_ns <= last_ns and not since_ns <= ended_ns <= until_ns

    return replace(
        result,
        streams=tuple([stream for stream in result.streams if served(stream.ended_ns)]),
        bystanders=tuple([one for one in result.bystanders if served(one.ended_ns)]),
        samples=tuple([sample for sample in result.samples if served(sample.at_ns)]),
        at_deadline=None,
        after_probe=None,
        settled=None,
        drain=None,
    )


def _without_gauges(*watches: str) -> Callable[[StormResult], StormResult]:
    """Without gauges of these kinds: all, when none is named."""

    def untouched(result: StormResult) -> StormResult:
        keys = {key for key, watch in result.watches.items() if not watches or watch in watches}

        def clean(sample: Sample) -> Sample:
            return replace(sample, gauges={key: value for key, value in sample.gauges.items() if key not in keys})

        return replace(
            result,
            watches={key: watch for key, watch in result.watches.items() if key not in keys},
            baseline=clean(result.baseline),
            samples=tuple([clean(sample) for sample in result.samples]),
            at_deadline=clean(result.at_deadline) if result.at_deadline else None,
            after_probe=clean(result.after_probe) if result.after_probe else None,
        )

    return untouched


def _streams(touched: Callable[[StormResult], Callable[[StreamRecord], bool]]) -> Callable[[StormResult], StormResult]:
    """Without these streams, and without the bystanders that they belong to."""

    def untouched(result: StormResult) -> StormResult:
        is_touched = touched(result)
        tags = {stream.ask.tag for stream in result.streams if is_touched(stream)}
        return replace(
            result,
            streams=tuple([stream for stream in result.streams if stream.ask.tag not in tags]),
            bystanders=tuple([one for one in result.bystanders if not _belongs(one, tags)]),
        )

    return untouched


def _belongs(one: BystanderRecord, tags: set[int]) -> bool:
    return one.tag is not None and one.tag in tags


def _of_unknown_origin(_result: StormResult) -> Callable[[StreamRecord], bool]:
    """Foreign words, and wrong ones that are too few to be traced."""
    return lambda stream: stream.fault is not None and stream.fault.damage in (Damage.FOREIGN, Damage.WRONG)


def _aborted(_result: StormResult) -> Callable[[StreamRecord], bool]:
    return lambda stream: stream.finish_reason == "abort"


def _same_error(result: StormResult) -> Callable[[StreamRecord], bool]:
    """The server's own words, under whatever status."""
    told = {_message(stream) for stream in result.streams if stream.end is End.ERROR_FRAME} - {""}
    return lambda stream: _message(stream) in told


def _message(stream: StreamRecord) -> str:
    return (stream.error or "").partition('"message":')[2].lstrip(' "')[:_MARKED]


_WORK = "work for a client that has gone keeps its gauges up"
_NOT_WORK = frozenset({"gauge_drift", "hidden_cleanup"})
CAUSES: tuple[Cause, ...] = (
    Cause("unreachable", _while_served, "a server that is gone answers nobody"),
    Cause("wedged", _while_served, "while nobody is served, everybody is cut off, refused or late"),
    Cause("abort_not_propagated", _without_gauges(), _WORK, _NOT_WORK),
    Cause("zombie_tokens", _without_gauges(), _WORK, _NOT_WORK),
    Cause("late_cancel", _without_gauges(), _WORK, _NOT_WORK),
    Cause("slot_leak", _without_gauges("kv_usage"), "a request that is never removed keeps its blocks"),
    Cause("crossed_stream", _streams(_of_unknown_origin), "few words of another request look like wrong ones"),
    Cause("collateral_abort", _streams(_aborted), "who is aborted gets no full answer"),
    Cause("hidden_error", _streams(_same_error), "the same failure is a status where the answer does not stream"),
)
