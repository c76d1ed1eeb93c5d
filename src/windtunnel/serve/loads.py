"""Load reports for routers that poll (gRPC `GetLoads`): the last step's gauges, and rates over a window."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from windtunnel.core.outputs import StepOutput
from windtunnel.core.units import S

WINDOW_NS = 2 * S
"""smg-grpc-servicer 0.14.1 measures throughput over the last two seconds."""
_BUCKET_NS = S // 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank as its last step left it."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0
    """Of the prefix cache, over all prompt tokens so far."""


@dataclass(slots=True)
class _Rank:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    queries: int = 0
    hits: int = 0
    buckets: deque[list[int]] = field(default_factory=deque)
    """[start, tokens] for each twentieth of a second of the window."""


class LoadObserver:
    """Sees the steps of all ranks. Rank 0 is always reported, zeros before its first step."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {0: _Rank()}

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        stats = step.stats
        if stats is None:
            return
        seen = self._ranks.setdefault(rank, _Rank())
        seen.running, seen.waiting, seen.kv_usage = stats.running, stats.waiting + stats.deferred, stats.kv_usage
        seen.queries += stats.prefix_queries
        seen.hits += stats.prefix_hits
        if step.outputs:
            _count(seen.buckets, sum(len(output.token_ids) for output in step.outputs), now_ns)

    def reports(self, now_ns: int) -> Iterator[tuple[int, LoadReport]]:
        for rank in sorted(self._ranks):
            yield rank, self.report(rank, now_ns)

    def report(self, rank: int, now_ns: int) -> LoadReport:
        """Zeros for a rank that has not made a step."""
        seen = self._ranks.get(rank) or _Rank()
        _trim(seen.buckets, now_ns)
        tokens = sum(tokens for _, tokens in seen.buckets)
        hit_rate = seen.hits / seen.queries if seen.queries else 0.0
        return LoadReport(seen.running, seen.waiting, seen.kv_usage, tokens * S / WINDOW_NS, hit_rate)


def _count(buckets: deque[list[int]], tokens: int, now_ns: int) -> None:
    if buckets and now_ns - buckets[-1][0] < _BUCKET_NS:
        buckets[-1][1] += tokens
        return
    buckets.append([now_ns, tokens])
    _trim(buckets, now_ns)


def _trim(buckets: deque[list[int]], now_ns: int) -> None:
    while buckets and now_ns - buckets[0][0] > WINDOW_NS:
        buckets.popleft()
