"""Fault `stale-gauges-after-abort`: gauges are written only by a step that computes (vLLM #22545, #29928).

After everything has been cancelled no such step comes, so running requests and KV usage stay where they were until the
next request.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windtunnel.core.outputs import StepOutput
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams


class StaleEngine(Proxy):
    """Withholds the statistics of steps that computed nothing, from an abort to the next step that does."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._aborted = False

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        ended: int = self._inner.abort(request_ids, now_ns, notify=notify)
        self._aborted = self._aborted or ended > 0
        return ended

    def advance(self, now_ns: int) -> list[StepOutput]:
        return [self._seen(step) for step in self._inner.advance(now_ns)]

    def _seen(self, step: StepOutput) -> StepOutput:
        if step.stats is None or not self._aborted:
            return step
        if step.stats.prefill_tokens or step.stats.decode_tokens:
            self._aborted = False
            return step
        return replace(step, stats=None)


class StaleGauges:
    NAME = "stale-gauges-after-abort"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=StaleEngine)


FAULT = StaleGauges()
