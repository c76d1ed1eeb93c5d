"""Our own thin interface to a deterministic event loop: virtual time, seeded order, and a hook before every step.

The one implementation is over `simloop`, which needs Python 3.12; development only. Nothing else here names it.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

AVAILABLE = sys.version_info >= (3, 12) and importlib.util.find_spec("simloop") is not None
REASON = "needs Python 3.12 or newer and simloop (pip install simloop)"


class SteppedLoop(Protocol):
    """An event loop that runs one callback at a time, in an order drawn from its seed."""

    steps: int
    before_step: Callable[[int], None]
    """Called with the number of the step that comes next."""

    def run(self, main: Coroutine[Any, Any, None]) -> None: ...


def new_loop(seed: int) -> Any:
    """A `SteppedLoop` that is also an `asyncio.AbstractEventLoop` with a simulated network."""
    from simloop import SimLoop
    from simloop import _transports as transports

    _drop_late_writes(transports._SimStreamTransport)

    class Loop(SimLoop):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(seed)
            self.steps = 0
            self.before_step: Callable[[int], None] = lambda _step: None

        def _step(self) -> None:
            self.before_step(self.steps)
            self.steps += 1
            super()._step()

        def run(self, main: Coroutine[Any, Any, None]) -> None:
            try:
                self.run_until_complete(main)
            finally:
                self.close()

    return Loop()


def _drop_late_writes(transport: Any) -> None:
    """asyncio's and uvloop's transports drop what is written after they began to close; simloop's raises."""
    write = transport.__dict__["write"]
    if getattr(write, "drops", False):
        return

    def write_or_drop(self: Any, data: Any) -> None:
        if not self.is_closing():
            write(self, data)

    write_or_drop.drops = True  # type: ignore[attr-defined]
    transport.write = write_or_drop


@contextmanager
def virtual_clock(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """The server's clock is the loop's, and its alarm the loop's timer: a timerfd is outside of the simulation."""
    from windtunnel.serve import clock

    def now_ns() -> int:
        return round(loop.time() * 1e9)

    replaced = {"now_ns": now_ns, "make_alarm": clock.LoopAlarm}
    modules = [module for name, module in sys.modules.items() if name.startswith(("windtunnel.serve", "windtunnel.faults"))]
    saved = [(module, name, getattr(module, name)) for module in modules for name in replaced if hasattr(module, name)]
    for module, name, _before in saved:
        setattr(module, name, replaced[name])
    try:
        yield
    finally:
        for module, name, before in saved:
            setattr(module, name, before)
