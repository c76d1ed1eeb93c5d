"""What leaving costs: work for nobody, late ends, retries beside their attempts, slower others, wrong counts."""

from collections.abc import Iterator

from windtunnel.lab.conservation import finished_beyond_clients, imbalances
from windtunnel.lab.evidence import seconds
from windtunnel.lab.latency import slowdowns
from windtunnel.lab.outlived import (
    Outlived,
    last_gone_ns,
    live,
    outlived,
    still_working,
    usual_ns,
    zombie_tokens,
)
from windtunnel.lab.record import StormResult


def ran_on(result: StormResult) -> Iterator[str]:
    return iter(()) if _router_to_blame(result) else _work_for_nobody(result)


def late_cancel(result: StormResult) -> Iterator[str]:
    return iter(()) if _router_to_blame(result) else _freed_late(result)


def abort_not_propagated(result: StormResult) -> Iterator[str]:
    """Behind a router, work for nobody is the router's when the worker frees a client that leaves it directly."""
    if _router_to_blame(result):
        assert result.direct is not None and result.direct.freed_ns is not None
        direct = (
            f"asked directly, {result.direct.source} freed a request {seconds(result.direct.freed_ns)} after its client left"
        )
        for line in (*_work_for_nobody(result), *_freed_late(result)):
            yield f"{line}; {direct}"


def _router_to_blame(result: StormResult) -> bool:
    direct = result.direct
    return direct is not None and direct.freed_ns is not None and direct.freed_ns <= result.cancel_grace_ns


def _work_for_nobody(result: StormResult) -> Iterator[str]:
    """Nothing ended it but itself, or nothing has ended it yet."""
    if not last_gone_ns(result) or result.interrupted:
        return
    if still_working(result):
        assert result.at_deadline is not None
        after = seconds(result.at_deadline.at_ns - last_gone_ns(result))
        yield f"tokens were still being made for nobody {after} after the last client had gone, when the wait for quiet ended"
    ran_out = finished_beyond_clients(result)
    made = zombie_tokens(result)
    if made and (still_working(result) or ran_out is None or ran_out > 0):
        yield (
            f"{made:g} tokens were generated while no client was connected,"
            f" more than {seconds(result.cancel_grace_ns)} after the last one had gone"
        )
    elif ran_out and _late(result):
        yield f"{ran_out:g} more requests were counted as finished than clients saw finish: they ran to their end"


def _late(result: StormResult) -> Outlived | None:
    """How long requests outlived their clients, where that is longer than the grace, and neither a leak nor a stale gauge."""
    seen = outlived(result)
    return seen if seen.longer_than(result.cancel_grace_ns) and not result.after_probe else None


def _freed_late(result: StormResult) -> Iterator[str]:
    late = _late(result)
    if late is None or result.interrupted or any(_work_for_nobody(result)):
        return
    yield (
        f"{late.samples} samples show requests of victims at work, the last {seconds(late.elapsed_ns)} after all had gone"
        f" (at least {seconds(late.witnessed_ns)} for certain); {seconds(result.cancel_grace_ns)} are allowed"
    )


def retry_storm_amplified(result: StormResult) -> Iterator[str]:
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
            grace = seconds(result.cancel_grace_ns)
            yield f"for over {grace} up to {most:g} more requests were at work than clients were waiting"
            return


def survivor_slowdown(result: StormResult) -> Iterator[str]:
    """Against streams of the same shape in rounds without victims."""
    return iter(slowdowns(result))


def cancel_miscounted(result: StormResult) -> Iterator[str]:
    return iter(imbalances(result))
