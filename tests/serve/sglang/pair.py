"""A prefill and a decode worker in this event loop, with real sockets between them and a real bootstrap server."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.core.sglang.driving import request
from tests.serve.live import PATIENCE_S

from windtunnel.core.outputs import StepOutput, TokenOutput
from windtunnel.core.pacing import StepPacing
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.units import MS
from windtunnel.serve.driver import EngineDriver
from windtunnel.serve.http11 import Cork
from windtunnel.serve.sglang.pd import Disaggregation
from windtunnel.serve.sglang.settings import DisaggSettings

PACING = StepPacing(base_ns=2 * MS, prefill_token_ns=0, decode_seq_ns=0)


class Side:
    """One worker with its driver. Hears its own outputs."""

    def __init__(self, settings: DisaggSettings, **more: Any) -> None:
        engine = SglangEngineConfig(max_total_num_tokens=4096, page_size=4, chunked_prefill_size=64, max_running_requests=32)
        self.pd = Disaggregation(settings, engine, PACING, Random(1), **more)
        self.worker = self.pd.worker
        self.driver = EngineDriver(self.worker, 0, asyncio.get_running_loop(), Cork(), [self])
        self.pd.attach(self.driver)
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)
        self.steps: list[StepOutput] = []
        self.closed = False

    def on_step(self, _rank: int, step: StepOutput, _now_ns: int) -> None:
        self.steps.append(step)
        for output in step.outputs:
            self.outputs[output.request_id].append(output)

    def on_output(self, output: TokenOutput) -> None:
        """A listener that needs nothing more."""

    def broken(self) -> None:
        raise AssertionError("an answer broke")

    def submit(self, name: str, room: int, address: tuple[str, int], prompt: int = 100, tokens: int = 4) -> None:
        assert self.driver.submit([request(name, prompt, tokens, bootstrap=(*address, room))], [self]) is None

    def ended(self, name: str) -> bool:
        return any(output.finish_reason is not None for output in self.outputs[name])

    def ending(self, name: str) -> tuple[str, int, str]:
        """(finish reason, status, message)."""
        (last,) = [output for output in self.outputs[name] if output.finish_reason is not None]
        assert last.finish_reason is not None
        error = last.error
        return last.finish_reason.value, 200 if error is None else error.status, "" if error is None else error.message

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    async def close(self) -> None:
        """As if the process had ended. A second call does nothing."""
        if not self.closed:
            self.closed = True
            await self.pd.close()
            self.driver.close()


class LivePair:
    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.prefill.pd.bootstrap_port

    def submit(self, name: str, room: int, *, legs: str = "pd", **more: Any) -> None:
        for leg, side in (("p", self.prefill), ("d", self.decode)):
            if leg in legs:
                side.submit(name, room, self.address, **more)

    def empty(self) -> bool:
        """Nothing is held on either side."""
        return not any(any(side.worker.outstanding().values()) for side in (self.prefill, self.decode))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def live_pair(
    settings: DisaggSettings | None = None, *, tp: tuple[int, int] = (1, 1), time_scale: float = 1.0, **decode: Any
) -> AsyncIterator[LivePair]:
    """`decode` changes settings of the decode side only."""
    settings = settings or DisaggSettings()
    sides: list[Side] = []
    try:
        one = replace(settings, mode="prefill", bootstrap_port=0)
        sides.append(Side(one, tp_size=tp[0], time_scale=time_scale))
        await sides[0].pd.start(1)
        other = replace(settings, mode="decode", num_reserved_decode_tokens=16, **decode)
        sides.append(Side(other, tp_size=tp[1], time_scale=time_scale))
        await sides[1].pd.start()
        yield LivePair(*sides)
    finally:
        for side in sides:
            await side.close()
