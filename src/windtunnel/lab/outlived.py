"""For how long requests outlived their clients, as far as samples bear witness.

A sample was true at some instant between its sending and its answer, and a machine that is short of cores stretches every
distance between two samples. So a time is bounded from below:

* It begins when the last victim had left *for certain* (`StreamRecord.gone_ns`), and it ends with the *sending* of a sample
  that still shows more work than there were clients.
* In between only *witnessed* time counts: of each distance between two answered samples at most half as much again as sampling
  takes in this storm, and at least `WITNESSES` samples must show the work. A server that has answered those has had its turns,
  and the end of a connection that came before them was there to be read.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from windtunnel.core.units import MS
from windtunnel.lab.record import Sample, StormResult
from windtunnel.lab.target import GENERATION_TOKENS

GAUGE_LAG_NS = 100 * MS
"""Gauges are written with a step; so much later than the truth they may be."""
WITNESSES = 5
_USUAL = 1.5


class Outlived(NamedTuple):
    """How long work without clients was seen. All zero: it was not."""

    witnessed_ns: int = 0
    """From below."""
    elapsed_ns: int = 0
    """By the clock, to the sending of the last sample that showed it."""
    samples: int = 0

    def longer_than(self, grace_ns: int) -> bool:
        return self.samples >= WITNESSES and self.witnessed_ns > grace_ns


def last_leave_ns(result: StormResult) -> int:
    """When the last victim left; 0 when none did."""
    return max((stream.left_ns for stream in result.streams if stream.left_ns is not None), default=0)


def last_gone_ns(result: StormResult) -> int:
    """When the last victim had left for certain; 0 when none did."""
    return max((stream.gone_ns or stream.ended_ns for stream in result.streams if stream.left_ns is not None), default=0)


def live(result: StormResult, sample: Sample) -> float | None:
    """Sequences at work above the baseline; None where a gauge cannot be read."""
    base = result.baseline.gauges
    keys = [key for key in ("running", "waiting") if key in base]
    if any(key not in sample.gauges for key in keys):
        return None
    return sum(sample.gauges.get(key, 0.0) - base.get(key, 0.0) for key in ("running", "waiting"))


def usual_ns(result: StormResult) -> int:
    """The longest distance between two samples that counts in full."""
    return usual_gap_ns([sample.at_ns for sample in result.samples if sample.usable], result.plan.sample_every_ns)


def usual_gap_ns(times_ns: Sequence[int], every_ns: int) -> int:
    gaps = [two - one for one, two in pairwise(times_ns)]
    return round(_USUAL * max(every_ns, median(gaps) if gaps else 0))


def watched_ns(times_ns: Sequence[int], since_ns: int, every_ns: int) -> int:
    """How much of the time from `since_ns` to the last of these samples is witnessed by them."""
    most_ns = usual_gap_ns(times_ns, every_ns)
    later = [at_ns for at_ns in times_ns if at_ns >= since_ns]
    return sum(min(two - one, most_ns) for one, two in pairwise([since_ns, *later]))


def judged(result: StormResult) -> list[Sample]:
    """The usable samples before the direct check, whose requests count as nobody's; the last may have been answered in it."""
    usable = [sample for sample in result.samples if sample.usable]
    direct_ns = next((phase.started_ns for phase in result.phases if phase.name == "direct"), None)
    return usable if direct_ns is None else [sample for sample in usable if sample.at_ns < direct_ns][:-1]


def witnessed(result: StormResult, since_ns: int) -> Iterator[tuple[Sample, int]]:
    """The usable samples that were sent after `since_ns`, each with the witnessed time until then."""
    most_ns, last_ns, total_ns = usual_ns(result), since_ns, 0
    for sample in judged(result):
        if sample.at_ns >= since_ns:
            total_ns += min(sample.at_ns - last_ns, most_ns)
            last_ns = sample.at_ns
            yield sample, total_ns


def outlived(result: StormResult) -> Outlived:
    """Work that goes on after the last victim has gone, until a sample without any client shows none.

    A sample that shows no more work than clients says nothing: one of them may not have been admitted yet. After such a one,
    work counts again only when it is there for longer than gauges lag behind.
    """
    gone_ns = last_gone_ns(result)
    until_ns = result.at_deadline.at_ns if result.at_deadline else None
    out, run_since, busy = Outlived(), 0, 0
    for sample, total_ns in witnessed(result, gone_ns) if gone_ns else ():
        at_work = live(result, sample)
        if (until_ns is not None and sample.at_ns > until_ns) or (at_work is not None and not sample.clients and at_work <= 0):
            break
        if at_work is None or at_work <= sample.clients:
            run_since = -1
            continue
        run_since = total_ns if run_since < 0 else run_since
        busy += 1
        if run_since == 0 or total_ns - run_since >= GAUGE_LAG_NS:
            out = Outlived(total_ns, sample.at_ns - gone_ns, busy)
    return out


def freed_after_ns(result: StormResult) -> int | None:
    """From the last victim's leaving to the first sample whose work is all accounted for, by the clock: from above."""
    left_ns, after = last_leave_ns(result), last_gone_ns(result) + outlived(result).elapsed_ns
    until_ns = result.at_deadline.at_ns if result.at_deadline else None
    for sample in result.samples:
        at_work = live(result, sample) if sample.usable else None
        if at_work is None or sample.at_ns < left_ns or (until_ns is not None and sample.at_ns > until_ns):
            continue
        if at_work <= sample.clients and (sample.at_ns > after or not outlived(result).samples):
            return sample.at_ns - left_ns
    return None


def zombie_tokens(result: StormResult) -> float:
    """Tokens generated between samples that saw no client, later than the grace after the last one was seen."""
    made, idle_ns, most_ns = 0.0, 0, usual_ns(result)
    usable = [sample for sample in judged(result) if GENERATION_TOKENS in sample.counters]
    for before, after in pairwise(usable):
        if before.clients or after.clients or before.opened != after.opened:
            idle_ns = 0
            continue
        if idle_ns >= result.cancel_grace_ns:
            made += max(0.0, after.counters[GENERATION_TOKENS] - before.counters[GENERATION_TOKENS])
        idle_ns += min(after.at_ns - before.at_ns, most_ns)
    return made


def still_working(result: StormResult) -> bool:
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


def idle_before_deadline(result: StormResult) -> Outlived:
    """The samples without a client, one after the other, that end with the deadline's."""
    last = result.at_deadline
    if last is None or last.clients:
        return Outlived()
    since_ns, count = last.at_ns, 0
    for sample in reversed([sample for sample in result.samples if sample.usable and sample.at_ns <= last.at_ns]):
        if sample.clients or sample.opened != last.opened:
            break
        since_ns, count = sample.at_ns, count + 1
    total = [ns for sample, ns in witnessed(result, since_ns) if sample.at_ns <= last.at_ns]
    return Outlived(total[-1] if total else 0, last.at_ns - since_ns, count)
