"""Fault `late-abort`: an abort takes effect only some time after it was asked for (vLLM #27901, #54947)."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from windtunnel.core.outputs import StepOutput
from windtunnel.core.units import S, parse_duration_ns
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams


class LateEngine(Proxy):
    """Keeps aborts back. They are carried out by the first `advance` after their time."""

    def __init__(self, inner: Any, delay_ns: int) -> None:
        super().__init__(inner)
        self._delay_ns = delay_ns
        self._due: deque[tuple[int, Sequence[str], bool]] = deque()

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        known = {view.request_id for view in self._inner.live()}
        self._due.append((now_ns + self._delay_ns, list(request_ids), notify))
        return len(known.intersection(request_ids))

    def next_event_at(self) -> int | None:
        at_ns: int | None = self._inner.next_event_at()
        if not self._due:
            return at_ns
        return self._due[0][0] if at_ns is None else min(at_ns, self._due[0][0])

    def advance(self, now_ns: int) -> list[StepOutput]:
        while self._due and self._due[0][0] <= now_ns:
            _at, request_ids, notify = self._due.popleft()
            self._inner.abort(request_ids, now_ns, notify=notify)
        done: list[StepOutput] = self._inner.advance(now_ns)
        return done


class LateAbort:
    NAME = "late-abort"

    def __init__(self, delay_ns: int = S) -> None:
        self._delay_ns = delay_ns

    def with_option(self, text: str) -> "LateAbort":
        return LateAbort(parse_duration_ns(text))

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=lambda engine: LateEngine(engine, self._delay_ns))


FAULT = LateAbort()
