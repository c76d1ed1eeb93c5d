"""Where request bodies are read: small ones on the event loop, large ones on a worker thread, so that no stream waits for them.

The worker is one thread, so large bodies are read one after the other. Python runs one thread at a time and looks for waiting
ones at every switch interval; with a short one the loop gets its turn back within a tenth of a millisecond, or when the library
call that the worker is in returns. So whatever is long must be many short calls (`BuiltinTokenizer` cuts its searches).
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.request import EngineRequest
from windtunnel.core.sources import SequenceSource
from windtunnel.wire.family import Generation, PromptPlan

OFF_LOOP_BYTES = 32 * 1024
SWITCH_INTERVAL_S = 0.0001
_NOTHING = SequenceSource(())

Result = TypeVar("Result")


class Planner:
    """Owns the worker thread, which starts with the first large body."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool: ThreadPoolExecutor | None = None
        self.off_loop = 0
        """How many bodies the worker has been given."""

    async def run(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """The result of `work`, which must change nothing that the loop's thread owns."""
        if size_bytes < OFF_LOOP_BYTES:
            return work()
        if self._pool is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
            self._pool = ThreadPoolExecutor(1, "windtunnel-planner")
        self.off_loop += 1
        return await self._loop.run_in_executor(self._pool, work)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class PrefixReader:
    """What an engine lets others do beforehand for its prefix cache, on any thread."""

    hasher: BlockHasher
    foresee: Callable[[list[bytes]], Sequence[int]]
    """`VllmEngine.foresee`. With several ranks that of one: for another it is a hint that does not hold."""


def prepare(generation: Generation, prefix: PrefixReader | None, identity: Callable[[PromptPlan], int]) -> Generation:
    """The same generation; its prompts with identities and, unless `prefix` is None, with block hashes and what is cached."""
    prompts = tuple(
        replace(_matched(prompt, generation, prefix) if prefix else prompt, identity=identity(prompt))
        for prompt in generation.prompts
    )
    return replace(generation, prompts=prompts)


def _matched(prompt: PromptPlan, generation: Generation, prefix: PrefixReader) -> PromptPlan:
    hashes = prefix.hasher.prompt_hashes(
        EngineRequest(
            "", prompt.token_ids, _NOTHING, 1, 0, lora=generation.lora, cache_salt=generation.cache_salt, media=prompt.media
        )
    )
    blocks = prefix.foresee(hashes)
    return replace(prompt, block_hashes=hashes, blocks=blocks)
