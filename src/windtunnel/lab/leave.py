"""How and when one client leaves, and the gate that holds many until all have come."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from windtunnel.lab.connection import How
from windtunnel.lab.plan import Moment, Trigger
from windtunnel.lab.record import Ask


@dataclass(frozen=True, slots=True)
class Leave:
    """How and when this client leaves. `wait` returns in a state that only the target knows, with the state's name."""

    how: How
    when: Trigger
    wait: Callable[[Ask, Moment], Awaitable[str]] | None = None
    gate: "Gate | None" = None
    stall_ns: int = 0
    """How long a client that stops reading stays."""

    @property
    def by_itself(self) -> bool:
        """The protocol ends the request; nothing is to be waited for and nothing to be done."""
        return self.how is How.DEADLINE


class Gate:
    """Lets nobody go before all have come. Whoever ends early counts as come; after `timeout_ns` everybody may go."""

    def __init__(self, expected: int, timeout_ns: int, opened: asyncio.Event | None = None) -> None:
        self._missing = expected
        self.timeout_ns = timeout_ns
        self._open = opened or asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def count_in(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._open.set()

    async def passed(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_ns / 1e9):
                await self._open.wait()
        except TimeoutError:
            self._open.set()
