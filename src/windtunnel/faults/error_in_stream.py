"""Fault `error-in-stream`: every second stream fails after its first frames, inside the 200 (reference §2.8, entry 18)."""

import itertools
from typing import Any

from windtunnel.core.outputs import EngineError, StepOutput
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams

_MESSAGE = "The request failed inside the engine."
_AFTER_OUTPUTS = 2


class FailingEngine(Proxy):
    """Fails every second request at its third output; its blocks are freed as in an abort."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._count = itertools.count()
        self._doomed: dict[str, int] = {}

    def submit(self, requests: Any, now_ns: int) -> Any:
        refusal = self._inner.submit(requests, now_ns)
        if refusal is None:
            self._doomed.update({request.request_id: 0 for request in requests if next(self._count) % 2})
        return refusal

    def abort(self, request_ids: Any, now_ns: int, *, notify: bool = False) -> Any:
        for request_id in request_ids:
            self._doomed.pop(request_id, None)
        return self._inner.abort(request_ids, now_ns, notify=notify)

    def advance(self, now_ns: int) -> list[StepOutput]:
        done: list[StepOutput] = self._inner.advance(now_ns)
        for step in done:
            step.outputs = [self._seen(output, now_ns) for output in step.outputs]
        return done

    def _seen(self, output: Any, now_ns: int) -> Any:
        seen = self._doomed.get(output.request_id)
        if seen is None:
            return output
        if seen < _AFTER_OUTPUTS and output.finish_reason is None:
            self._doomed[output.request_id] = seen + 1
            return output
        self.abort([output.request_id], now_ns)
        return output._replace(token_ids=(), finish_reason=None, error=EngineError(_MESSAGE))


class ErrorInStream:
    NAME = "error-in-stream"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=FailingEngine)


FAULT = ErrorInStream()
