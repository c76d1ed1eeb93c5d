"""Drive an engine in virtual time, with the integrity check after every turn."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from windtunnel.core.engine import Engine
from windtunnel.core.outputs import StepOutput, StepStats, TokenOutput
from windtunnel.core.pacing import StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine
from windtunnel.core.sources import SequenceSource
from windtunnel.core.units import MS, S

PACING = StepPacing(base_ns=10 * MS, prefill_token_ns=10_000, decode_seq_ns=0)


def request(name: str, prompt: Sequence[int] | int = 8, tokens: int = 4, **more: Any) -> EngineRequest:
    """`prompt` as a number: so many tokens that no other name shares."""
    if isinstance(prompt, int):
        chance = Random(name)
        prompt = [chance.randrange(1 << 20) for _ in range(prompt)]
    source = SequenceSource(range(1000, 1000 + 7), ignore_eos=True)
    return EngineRequest(name, tuple(prompt), source, tokens, 0, **more)


def make_engine(seed: int = 1, **settings: Any) -> SglangEngine:
    fields = {"max_total_num_tokens": 1024, "page_size": 4, "chunked_prefill_size": 64, **settings}
    return SglangEngine(SglangEngineConfig(**fields), PACING, Random(seed))


def run(engine: Engine, until_ns: int | None = None, stop: Callable[[], bool] | None = None) -> list[StepOutput]:
    """Advance event by event until nothing is due (or `until_ns`), at most 100,000 times."""
    steps: list[StepOutput] = []
    for _ in range(100_000):
        at = engine.next_event_at()
        if at is None or (until_ns is not None and at > until_ns) or (stop is not None and stop()):
            return steps
        steps += engine.advance(at)
        engine.check_integrity()
    raise AssertionError("the engine does not come to rest")


def outputs(steps: Sequence[StepOutput], name: str | None = None) -> list[TokenOutput]:
    return [output for step in steps for output in step.outputs if name in (None, output.request_id)]


def tokens(steps: Sequence[StepOutput], name: str) -> list[int]:
    return [token for output in outputs(steps, name) for token in output.token_ids]


def ending(steps: Sequence[StepOutput], name: str) -> TokenOutput:
    """The output that ended a request; there is exactly one."""
    (last,) = [output for output in outputs(steps, name) if output.finish_reason is not None]
    return last


def stats(steps: Sequence[StepOutput]) -> list[StepStats]:
    return [step.stats for step in steps if step.stats is not None]


__all__ = ["MS", "PACING", "S", "ending", "make_engine", "outputs", "request", "run", "stats", "tokens"]
