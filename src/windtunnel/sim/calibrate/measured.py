"""A measured request, whatever tool measured it, and runs of them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Measured:
    """One request that succeeded. Times in milliseconds from its sending; `chunks` are (arrival, tokens so far), never empty.

    `sent_s` is on any clock that all requests of a run share.
    """

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: tuple[tuple[float, int], ...]
    e2e_ms: float
    cached_tokens: int = 0
    headers_ms: float | None = None

    @property
    def ttft_ms(self) -> float:
        return self.chunks[0][0]

    @cached_property
    def gaps_ms(self) -> list[float]:
        """Between chunks, not divided by their tokens."""
        return [later[0] - earlier[0] for earlier, later in pairwise(self.chunks)]

    @cached_property
    def token_gaps_ms(self) -> list[float]:
        """The same for each token: a chunk of n tokens counts n times with a part each."""
        out: list[float] = []
        for earlier, later in pairwise(self.chunks):
            count = later[1] - earlier[1]
            out += [(later[0] - earlier[0]) / count] * count
        return out

    @property
    def end_s(self) -> float:
        return self.sent_s + self.e2e_ms / 1e3


@dataclass(frozen=True)
class Run:
    """Requests under one load. `concurrency` clients in a closed loop, or None: requests came at their own times."""

    name: str
    concurrency: int | None
    requests: Sequence[Measured]
    group: str = ""
    """Runs that were measured together, one soon after another: their surroundings were the same (a pass of the trace)."""
    other_jobs: tuple[tuple[float, float], ...] = ()
    """Where it is known: (up to this time in s, cores that other jobs took), in order."""

    def other_cores_at(self, time_s: float) -> float:
        jobs = self.other_jobs
        return jobs[min(bisect_right(jobs, time_s, key=_until_s), len(jobs) - 1)][1] if jobs else 0.0

    @cached_property
    def thinks_ms(self) -> list[float]:
        """From an answer's end to the next request of a closed loop: the client's own pauses."""
        if self.concurrency is None:
            return []
        ends = sorted(request.end_s for request in self.requests)
        sends = sorted(request.sent_s for request in self.requests)[self.concurrency :]
        return [max(0.0, 1e3 * (send - end)) for end, send in zip(ends, sends, strict=False)]


def _until_s(job: tuple[float, float]) -> float:
    return job[0]
