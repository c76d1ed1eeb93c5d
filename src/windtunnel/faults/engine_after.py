"""Faults `engine-death` and `engine-freeze`: something happens to the engine once it has run so many steps.

Death: every request fails, nothing more is taken, `/health` is 503 and the watchdog ends the server (reference §3.9; vLLM
#43226). Freeze: the engine falls silent while health stays green (vLLM #39863).
"""

from collections.abc import Callable
from typing import Any

from windtunnel.core.outputs import StepOutput
from windtunnel.faults.proxy import Proxy
from windtunnel.serve.seams import Seams

_FOR_EVER_NS = 1 << 62

Blow = Callable[[Any, int], object]


class EngineWithFate(Proxy):
    """Counts the steps that computed something; after the last one the blow falls, once."""

    def __init__(self, inner: Any, steps: int, blow: Blow) -> None:
        super().__init__(inner)
        self._left = steps
        self._blow = blow

    def advance(self, now_ns: int) -> list[StepOutput]:
        done: list[StepOutput] = self._inner.advance(now_ns)
        computed = sum(1 for step in done if step.stats and (step.stats.prefill_tokens or step.stats.decode_tokens))
        if computed and self._left > 0:
            self._left -= computed
            if self._left <= 0:
                self._blow(self._inner, now_ns)
        return done


class EngineAfter:
    def __init__(self, name: str, blow: Blow, steps: int) -> None:
        self.NAME = name
        self._blow = blow
        self._steps = steps

    def with_option(self, text: str) -> "EngineAfter":
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise ValueError(f"{self.NAME}:{text}: must be a number of steps, at least 1")
        return EngineAfter(self.NAME, self._blow, int(text))

    def attach(self, seams: Seams) -> Seams:
        return seams.around(engine=lambda engine: EngineWithFate(engine, self._steps, self._blow))


def kill(engine: Any, now_ns: int) -> None:
    engine.kill(now_ns)


def freeze(engine: Any, _now_ns: int) -> None:
    engine.freeze(_FOR_EVER_NS)
