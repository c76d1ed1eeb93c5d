"""An answer that its reader fetches, delta by delta (gRPC): the other way round from `StreamedAnswer`, which writes."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from windtunnel.serve.streams import Answer
from windtunnel.wire.family import Delta, Usage
from windtunnel.wire.output import ChoiceState, merge

BACKLOG_MAX = 64
"""Deltas that wait for a slow reader; further ones merge into the last of their choice, as in vLLM's output collector."""


class FetchedAnswer(Answer):
    """Deltas in the order in which the engine made them, one for each output while the reader keeps pace.

    What waits is bounded by `BACKLOG_MAX` deltas for each choice and by the request's own `max_tokens`.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceState],
        usage: Usage,
        loop: asyncio.AbstractEventLoop,
        counted: Iterable[int] = (),
    ) -> None:
        super().__init__(choices, usage, self._wake, counted)
        self._loop = loop
        self._backlog: deque[Delta] = deque()
        self._last: dict[int, int] = {}
        """Where in the backlog the last delta of each choice is, counted from the first delta ever."""
        self._taken = 0
        self._waiter: asyncio.Future[None] | None = None

    def take(self) -> Delta | None:
        """The next delta; None when there is none at the moment."""
        if not self._backlog:
            return None
        self._taken += 1
        return self._backlog.popleft()

    async def more(self) -> bool:
        """Wait for a delta or the end; False at the end, when everything has been taken. For one reader."""
        while not self._backlog:
            if not self.open:
                return False
            self._waiter = self._loop.create_future()
            await self._waiter
        return True

    def _emit(self, delta: Delta) -> None:
        at = self._last.get(delta.index, -1) - self._taken
        if len(self._backlog) >= BACKLOG_MAX and at >= 0:
            self._backlog[at] = merge(self._backlog[at], delta)
        else:
            self._last[delta.index] = self._taken + len(self._backlog)
            self._backlog.append(delta)
        self._wake()
        super()._emit(delta)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
