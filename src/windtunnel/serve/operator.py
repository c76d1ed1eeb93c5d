"""What an operator has switched in the front end. The engine's own switches are in `engine.control`."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Weights:
    """The weight-update family in the small: which version, and whether an update is under way."""

    version: str = "default"
    transfer: bool = False
    updating: bool = False


@dataclass(slots=True)
class OperatorState:
    """Owned by the server; changed by operator routes only."""

    loras_at_start: int
    weights: Weights = field(default_factory=Weights)
    profiling: bool = False
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _lora_ids: "itertools.count[int]" = field(init=False)

    def __post_init__(self) -> None:
        self._lora_ids = itertools.count(self.loras_at_start + 1)

    def next_lora_id(self) -> int:
        return next(self._lora_ids)

    def resumed(self) -> None:
        """Whoever waits in `idle_or_resumed` need not wait any more."""
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def idle_or_resumed(self, idle: "asyncio.Future[Any]") -> None:
        """Wait for `idle` or the next `resumed`, whichever comes first."""
        resumed: asyncio.Future[Any] = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait([idle, resumed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            resumed.cancel()
            idle.cancel()
