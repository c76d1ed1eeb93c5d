"""`--sse-keep-alive-interval`: comment frames on a stream that has nothing else to say (vLLM reference §3.1)."""

import asyncio
from collections.abc import Callable

from windtunnel.serve.streams import StreamedAnswer


def keep_alive(
    loop: asyncio.AbstractEventLoop, answer: StreamedAnswer, progress: Callable[[], int], interval_ns: int, frame: bytes
) -> Callable[[], None]:
    """Write `frame` whenever an interval passes without progress. Returns what stops it. An interval of 0 is off."""
    if interval_ns <= 0:
        return _nothing
    handle: asyncio.TimerHandle | None = None
    seen = -1

    def tick() -> None:
        nonlocal handle, seen
        done = progress()
        if done == seen:
            answer.keep_alive(frame)
        seen = done
        handle = loop.call_later(interval_ns / 1e9, tick)

    def stop() -> None:
        if handle is not None:
            handle.cancel()

    tick()
    return stop


def _nothing() -> None:
    pass
