"""Do the target's counters add up with what its clients saw?

Requests sent = finished + aborted by their clients + aborted by id + refused + in flight (vLLM reference §9.11, n counts n
times); aborts counted never exceed aborts made (SGLang reference §11.3). Real vLLM counts nothing for a client that left
(§3.8), so a departure may be missing from every counter, but never be in two. Checked only when the target was idle at the
baseline and the last sample saw no client; bounded from both sides: whoever left near its end may be counted as finished.
"""

from windtunnel.lab.dialects import DIALECTS
from windtunnel.lab.record import End, Sample, StormResult, StreamRecord

_FINISHED = ("stop", "length", "repetition")
_SUCCESS = "request_success"
_SGLANG_ABORTS = "num_aborted_requests"


_PD_LEGS = frozenset({"num_prefill_inflight_queue_reqs", "num_decode_transfer_queue_reqs"})
"""With the metrics of both sides of a P/D pair every request is counted on either leg."""
LEASES = ("nixl_num_kv_expired_reqs", "mooncake_num_kv_expired_reqs")
"""Holds of a prefill that nobody ended. A vLLM with one of these counters is one side of such a pair."""


def _countable(result: StormResult) -> Sample | None:
    """The last sample, where the counters since the baseline are those of this storm's requests."""
    settled = result.settled
    if settled is None or not settled.usable or result.interrupted or not result.streams:
        return None
    base = result.baseline
    one_leg = set(base.gauges) >= _PD_LEGS or any(key in base.counters for key in LEASES)
    if one_leg or any(base.gauges.get(key) for key in ("running", "waiting")):
        return None
    return settled


def finished_beyond_clients(result: StormResult) -> float | None:
    """How many requests were counted as finished that no client saw finish; None where nobody counts."""
    settled = _countable(result)
    counted = None if settled is None else _counted(result, settled)
    return None if counted is None else max(0.0, counted - _seen(result))


def imbalances(result: StormResult) -> list[str]:
    """One sentence for each sum that does not add up."""
    settled = _countable(result)
    if settled is None:
        return []
    return [*_finished(result, settled), *_aborted(result, settled), *_tokens(result, settled)]


def _rise(result: StormResult, settled: Sample, key: str) -> float | None:
    """Since the baseline; None where there is no such counter."""
    if key not in settled.counters:
        return None
    return settled.counters[key] - result.baseline.counters.get(key, 0.0)


def _count(result: StormResult, *ends: End) -> int:
    """Requests that began between the two samples and ended so; n counts n times."""
    return sum(stream.ask.n for stream in _since_baseline(result) if stream.end in ends)


def _since_baseline(result: StormResult) -> list[StreamRecord]:
    """And before the last sample: known pairs are asked again after it."""
    settled = result.settled
    return [
        stream
        for stream in result.streams
        if stream.started_ns >= result.baseline.at_ns and (settled is None or stream.started_ns <= settled.at_ns)
    ]


def _counted(result: StormResult, settled: Sample) -> float | None:
    """Requests that the server counts as finished; None where it does not count them."""
    rises = [_rise(result, settled, f"{_SUCCESS}{{{reason}}}") for reason in _FINISHED]
    known = [rise for rise in rises if rise is not None]
    return sum(known) if known else None


def _seen(result: StormResult) -> int:
    """Sequences whose clients saw them finish."""
    return sum(
        stream.ask.n for stream in _since_baseline(result) if stream.end is End.FINISHED and stream.finish_reason != "abort"
    )


def _finished(result: StormResult, settled: Sample) -> list[str]:
    counted = _counted(result, settled)
    if counted is None:
        return []
    least = _seen(result)
    most = sum(stream.ask.n for stream in _since_baseline(result) if stream.end not in (End.REFUSED, End.ERROR_STATUS))
    if counted < least:
        return [f"{counted:g} requests were counted as finished, but clients saw {least} finish"]
    if counted > most:
        return [
            f"{counted:g} requests were counted as finished, but at most {most} can have been (unless others ask here, too)"
        ]
    return _unmade(result, settled, counted - least)


def _unmade(result: StormResult, settled: Sample, beyond: float) -> list[str]:
    """Whoever was counted as finished unseen must have been computed: a request asks for all of its tokens, if its API lets it.

    Only where one word is one token (the oracle's servers). Those that lacked least are taken to be the ones.
    """
    made = _rise(result, settled, "generation_tokens")
    if made is None or not result.oracle or beyond < 1:
        return []
    records = _since_baseline(result)
    unseen = sorted(_lacking(stream) for stream in records for _ in range(_unseen(stream)))
    needed = sum(len(stream.words) for stream in records) + sum(unseen[: int(beyond)])
    if made >= needed:
        return []
    return [
        f"{beyond:g} requests were counted as finished whose clients had left; together with what clients read that takes"
        f" {needed} tokens, but {made:g} were made"
    ]


def _lacking(stream: StreamRecord) -> int:
    """How many tokens at least were to be made beyond those that its client read."""
    return stream.ask.max_tokens - len(stream.words) if DIALECTS[stream.ask.api].fixed_length else 0


def _unseen(stream: StreamRecord) -> int:
    """How many sequences of it may have finished without being seen."""
    return 0 if stream.end in (End.FINISHED, End.REFUSED) else stream.ask.n


def _aborted(result: StormResult, settled: Sample) -> list[str]:
    counted = _rise(result, settled, f"{_SUCCESS}{{abort}}")
    counted = _rise(result, settled, _SGLANG_ABORTS) if counted is None else counted
    saw = sum(
        stream.ask.n for stream in _since_baseline(result) if stream.end is not End.LEFT and stream.finish_reason == "abort"
    )
    most = _count(result, End.LEFT, End.TIMEOUT, End.CUT, End.CLIENT_DIED) + saw
    if counted is not None and counted > most:
        return [f"{counted:g} requests were counted as aborted, but only {most} were"]
    return []


def _tokens(result: StormResult, settled: Sample) -> list[str]:
    """Words delivered are no more than tokens generated, where one word is one token (the oracle's servers)."""
    made = _rise(result, settled, "generation_tokens")
    if made is None or not result.oracle:
        return []
    delivered = sum(len(stream.words) for stream in _since_baseline(result))
    return [f"{delivered} words were delivered, but only {made:g} tokens were counted"] if delivered > made else []
