"""What clients that stay see: wrong answers, broken streams, a server that serves nobody or does not end."""

from collections import Counter
from collections.abc import Iterator

from windtunnel.lab.causes import hung
from windtunnel.lab.evidence import fell_silent, named, owner, seconds, slept, unrelated, why
from windtunnel.lab.plan import Role
from windtunnel.lab.pulse import starved
from windtunnel.lab.record import Damage, End, StormResult, StreamRecord


def bystander_error(result: StormResult) -> Iterator[str]:
    hanging = {stream.ask.tag for stream in result.streams if hung(stream)}  # for `wedged` to judge
    for one in result.bystanders:
        if one.tag in hanging or (one.status is None and starved(result.lags, one.sent_ns, one.ended_ns)):
            continue
        if one.status != one.expect_status or (one.error and not one.fault):
            got = "no status" if one.status is None else f"status {one.status}"
            yield f"{one.kind} at {seconds(one.sent_ns)}: {got} instead of {one.expect_status}{why(one.error)}"
    for stream in unrelated(result):
        if stream.end is End.ERROR_STATUS:
            yield f"{named(stream)}: status {stream.status} instead of 200{why(stream.error)}"
    for sample in result.samples:
        if sample.status not in (200, None):
            yield f"metrics sample at {seconds(sample.at_ns)}: status {sample.status} instead of 200"


def crossed_stream(result: StormResult) -> Iterator[str]:
    for stream in result.streams:
        fault = stream.fault
        if fault is not None and fault.damage is Damage.FOREIGN:
            yield f"{named(stream)}: word {fault.position} is {fault.have!r}, which belongs to {owner(result, fault.owner)}"


def corrupt_stream(result: StormResult) -> Iterator[str]:
    for stream in result.streams:
        if stream.end is End.EMPTY and stream.ask.role is not Role.VICTIM:
            yield f"{named(stream)}: an empty answer under status {stream.status}{why(stream.error)}"
        fault = stream.fault
        if fault is not None and fault.damage is not Damage.FOREIGN:
            got = f"{fault.have!r} instead of {fault.want!r}" if fault.have else f"nothing, {fault.want!r} is due"
            if stream.finish_reason == "abort":
                continue
            yield f"{named(stream)}: {fault.damage.value} at word {fault.position} of {stream.ask.max_tokens}: {got}"

    for pair in result.known:
        if pair.before != pair.after:
            at = next((at for at, (one, two) in enumerate(zip(pair.before, pair.after, strict=False)) if one != two), None)
            where = f"from word {at}" if at is not None else f"in length ({len(pair.after)} words, before {len(pair.before)})"
            yield f"known answer [wt:{pair.tag:x}], alike twice before the storm, differs after it {where}"


def unterminated_stream(result: StormResult) -> Iterator[str]:
    for stream in unrelated(result):
        if stream.end in (End.CUT, End.UNTERMINATED, End.MALFORMED) or fell_silent(result, stream):
            yield f"{named(stream)}: {stream.end.value} after {len(stream.words)} words{why(stream.error)}"


def hidden_error(result: StormResult) -> Iterator[str]:
    for stream in unrelated(result):
        if stream.end is End.ERROR_FRAME:
            yield f"{named(stream)}: an error under status {stream.status}{why(stream.error)}"


def collateral_abort(result: StormResult) -> Iterator[str]:
    for stream in result.of(Role.PROBE, Role.SURVIVOR, Role.LATER, Role.BYSTANDER, Role.CALM, Role.RETRY, Role.KNOWN):
        if stream.finish_reason == "abort":
            yield f"{named(stream)}: ended as aborted after {len(stream.words)} words, and its client had not left"


def is_gone(result: StormResult) -> bool:
    """Whether the server accepts no connection at the end: every later stream, or else the last request, was refused."""
    asked = result.of(Role.LATER) or tuple(sorted(result.streams, key=lambda one: one.started_ns)[-1:])
    return result.drain is None and bool(asked) and all(stream.end is End.REFUSED for stream in asked)


def unreachable(result: StormResult) -> Iterator[str]:
    if is_gone(result):
        refused = sum(stream.end is End.REFUSED for stream in result.streams)
        yield f"the server no longer accepts connections: {refused} requests were refused, the last ones among them"


def wedged(result: StormResult) -> Iterator[str]:
    if is_gone(result):
        return
    later = result.of(Role.LATER)
    if later and all(_failed(stream) or _stood_still(result, stream) for stream in later):
        yield f"none of {len(later)} later streams was served: {dict(Counter(stream.end.value for stream in later))}"
        return
    for stream in result.of(Role.PROBE, Role.CALM, Role.SURVIVOR, Role.RETRY, Role.BYSTANDER, Role.LATER):
        if hung(stream) and not slept(result, stream):
            yield f"{named(stream)}: {stream.end.value}{why(stream.error)}"


def _stood_still(result: StormResult, stream: StreamRecord) -> bool:
    """From its start or in its middle: where a wedge falls among the later streams is chance."""
    return fell_silent(result, stream) or (hung(stream) and not slept(result, stream))


def _failed(stream: StreamRecord) -> bool:
    return stream.end is End.ERROR_STATUS and (stream.status or 0) >= 500


def drain_timeout(result: StormResult) -> Iterator[str]:
    drain = result.drain
    if drain is None:
        return
    if drain.exited_ns is None:
        yield f"the process was still there {seconds(drain.deadline_ns)} after SIGTERM with {drain.streams} streams open"
    if drain.unended:
        after = seconds(drain.exited_ns or drain.deadline_ns)
        yield f"{drain.unended} of {drain.streams} streams had not ended {after} after SIGTERM"
