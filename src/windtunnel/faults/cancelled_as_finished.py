"""Fault `cancelled-as-finished`: whoever leaves is counted as served in full (LiteLLM #39748, production-stack #1001)."""

from collections.abc import Iterable

from windtunnel.core.outputs import FinishReason
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.clock import now_ns
from windtunnel.serve.seams import Seams


class MiscountingMetrics(Proxy):
    def on_dropped(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._inner.on_finished(request_id, FinishReason.LENGTH, now_ns())


class CancelledAsFinished:
    NAME = "cancelled-as-finished"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(metrics=MiscountingMetrics)


FAULT = CancelledAsFinished()
