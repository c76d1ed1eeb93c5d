"""What a server keeps of `/v1/responses`: finished responses by id, and the background runs behind them.

vLLM's own store is a dictionary that is never emptied. This one is bounded (`--max-stored-responses`): the oldest goes first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from windtunnel.serve.jobs import Job
from windtunnel.serve.streams import Answer, Lane
from windtunnel.wire.env import Stored

_FRAME_END = b"\n\n"


class StoredResponses:
    """The store. Owned by the server; everything in it is a value."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str) -> Stored | None:
        return self._kept.get(response_id)

    def put(self, response_id: str, stored: Stored) -> None:
        self._kept[response_id] = stored
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)


class EventLog:
    """A sink that remembers the events of a background run, for any number of readers.

    Bounded by the run's own `max_tokens`.
    """

    blocked = False

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._closed = False
        self._news = asyncio.Event()

    def write(self, frames: bytes) -> None:
        self._frames += [part + _FRAME_END for part in frames.split(_FRAME_END) if part]
        self._tell()

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Never blocked, so never called."""

    def lane(self, head: bytes, tail: bytes) -> Lane:
        raise NotImplementedError("a response encoder has no plain deltas")

    def close(self) -> None:
        """The run has ended well. A run that failed or was cancelled leaves its readers waiting, as in vLLM (§3.5)."""
        self._closed = True
        self._tell()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Events from number `start` on, to the end of the run."""
        position = max(0, start)
        while True:
            if position < len(self._frames):
                yield self._frames[position]
                position += 1
            elif self._closed:
                return
            else:
                await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundRun:
    """One response that no client waits for. Owned by `BackgroundRuns`."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.answer: Answer | None = None
        self.job: Job | None = None

    @property
    def open(self) -> bool:
        return self.answer is not None and self.answer.open


class BackgroundRuns:
    """All background runs by response id; as bounded as the store."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[str, BackgroundRun] = OrderedDict()

    def get(self, response_id: str) -> BackgroundRun | None:
        return self._runs.get(response_id)

    def add(self, response_id: str, run: BackgroundRun) -> None:
        """Forgets the oldest finished run when there are too many; runs at work are bounded by the server's open answers."""
        self._runs[response_id] = run
        if len(self._runs) > self._limit:
            finished = next((key for key, old in self._runs.items() if not old.open), None)
            if finished is not None and finished != response_id:
                del self._runs[finished]
