"""`--load-balance-method`: which data-parallel rank of a prefill gets a request that names none (SGLang reference §2.5).

Load is what the ranks' engines hold at that moment; how fresh SGLang's own counts are is not in our sources.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from windtunnel.core.outputs import StepOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.loop import SglangLoop


class PrefillPlacer:
    """Owns the turn of `round_robin`."""

    by_choice = True
    """Each choice has a room of its own, from which the decode tells the rank."""

    def __init__(self, method: str, engines: Sequence[SglangLoop]) -> None:
        self._engines = engines
        self._turns = itertools.cycle(range(len(engines)))
        self._choose = _METHODS[method]

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        """The engines themselves are looked at."""

    def choose(self, request: EngineRequest, _now_ns: int) -> int:
        return self._choose(self, request)

    def _by_room(self, request: EngineRequest) -> int:
        """A request without a room is refused by whichever rank gets it."""
        return request.bootstrap[2] % len(self._engines) if request.bootstrap else 0

    def _by_turns(self, _request: EngineRequest) -> int:
        return next(self._turns)

    def _fewest_requests(self, _request: EngineRequest) -> int:
        return self._least(lambda engine: len(engine.live()))

    def _fewest_tokens(self, _request: EngineRequest) -> int:
        return self._least(lambda engine: sum(view.prompt_tokens + view.output_tokens for view in engine.live()))

    def _least(self, load: Callable[[SglangLoop], int]) -> int:
        return min(range(len(self._engines)), key=lambda rank: load(self._engines[rank]))


_METHODS: Mapping[str, Callable[[PrefillPlacer, EngineRequest], int]] = MappingProxyType(
    {
        "follow_bootstrap_room": PrefillPlacer._by_room,
        "round_robin": PrefillPlacer._by_turns,
        "total_requests": PrefillPlacer._fewest_requests,
        "total_tokens": PrefillPlacer._fewest_tokens,
    }
)
