"""Faults that leave a ghost in the gauges for every request that is aborted: one table, one class.

The request itself is gone; what it held, or was counted in, is not given back. That is how these defects look from outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windtunnel.core.outputs import StepOutput, StepStats
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams

_KV_SHARE = 0.002
"""Of the pool, for each ghost."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """What one aborted request adds to the gauges for good."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0

    def haunt(self, stats: StepStats, count: int) -> StepStats:
        return stats._replace(
            running=stats.running + count * self.running,
            waiting=stats.waiting + count * self.waiting,
            kv_usage=min(1.0, stats.kv_usage + count * self.kv_usage),
        )


class HauntedEngine(Proxy):
    def __init__(self, inner: Any, ghost: Ghost) -> None:
        super().__init__(inner)
        self._ghost = ghost
        self._count = 0

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        ended: int = self._inner.abort(request_ids, now_ns, notify=notify)
        self._count += ended
        return ended

    def advance(self, now_ns: int) -> list[StepOutput]:
        return [self._seen(step) for step in self._inner.advance(now_ns)]

    def _seen(self, step: StepOutput) -> StepOutput:
        return step if step.stats is None else replace(step, stats=self._ghost.haunt(step.stats, self._count))


class GhostFault:
    def __init__(self, name: str, ghost: Ghost) -> None:
        self.NAME = name
        self._ghost = ghost

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=lambda engine: HauntedEngine(engine, self._ghost))


GHOSTS: dict[str, Ghost] = {
    "slot-leak-on-abort": Ghost(running=1, kv_usage=_KV_SHARE),
    "kv-leak-on-abort": Ghost(kv_usage=_KV_SHARE),
    "orphan-in-queue": Ghost(waiting=1),
    "counts-down-on-success-only": Ghost(running=1),
    "counted-out-twice": Ghost(running=-1),
}
