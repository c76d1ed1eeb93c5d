"""Fault `written-into-others`: after an abort, two requests of a step get one another's tokens (vLLM #32255, llm-d-router #1147).

The blocks of the aborted request were given to somebody else while something still wrote to them; which two of a step are hit stays
the same for as long as both are in it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windtunnel.core.outputs import StepOutput, TokenOutput
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams


class CrossingEngine(Proxy):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._aborted = False

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        ended: int = self._inner.abort(request_ids, now_ns, notify=notify)
        self._aborted = self._aborted or ended > 0
        return ended

    def advance(self, now_ns: int) -> list[StepOutput]:
        done: list[StepOutput] = self._inner.advance(now_ns)
        return [replace(step, outputs=_crossed(step.outputs)) for step in done] if self._aborted else done


def _crossed(outputs: list[TokenOutput]) -> list[TokenOutput]:
    """The first two that have one token each, exchanged."""
    both = [at for at, output in enumerate(outputs) if len(output.token_ids) == 1][:2]
    if len(both) < 2:
        return outputs
    one, two = both
    crossed = list(outputs)
    crossed[one] = outputs[one]._replace(token_ids=outputs[two].token_ids)
    crossed[two] = outputs[two]._replace(token_ids=outputs[one].token_ids)
    return crossed


class WrittenIntoOthers:
    NAME = "written-into-others"

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=CrossingEngine)


FAULT = WrittenIntoOthers()
