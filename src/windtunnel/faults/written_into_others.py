"""Fault `written-into-others`: once somebody was aborted, every second request gets the words of the one before it.

The blocks of the aborted request were given away while something still wrote to them (vLLM #32255); two streams that share a
queue look the same (llm-d-router #1147).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windtunnel.core.outputs import Refusal
from windtunnel.core.request import EngineRequest, TokenSource
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams

_OWN = 3
"""So many first tokens are right."""


class SplicedSource(Proxy):
    """The tokens of `inner`, and from some position on those of another request."""

    def __init__(self, inner: TokenSource, other: TokenSource) -> None:
        super().__init__(inner)
        self._other = other

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        own = max(0, min(count, _OWN - start))
        return [*self._inner.token_ids(start, own), *self._other.token_ids(start + own, count - own)]


class CrossingEngine(Proxy):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._aborted = False
        self._count = itertools.count()
        self._before: TokenSource | None = None

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        ended: int = self._inner.abort(request_ids, now_ns, notify=notify)
        self._aborted = self._aborted or ended > 0
        return ended

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        refusal: Refusal | None = self._inner.submit([self._written_into(request) for request in requests], now_ns)
        return refusal

    def _written_into(self, request: EngineRequest) -> EngineRequest:
        before, self._before = self._before, request.source
        if before is None or not self._aborted or next(self._count) % 2 == 0:
            return request
        return replace(request, source=SplicedSource(request.source, before))


class WrittenIntoOthers:
    NAME = "written-into-others"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=CrossingEngine)


FAULT = WrittenIntoOthers()
