"""How long the event loop is held at a time while prompts of 100,000 tokens are worked on, in CPU time: no neighbour counts.

A server runs in this process on asyncio's own loop, every callback of which is timed on the loop thread's clock. 100 streams
with 20 ms between tokens run; then the same beside long prompts. A frame that falls due waits at most for the callback under
way (`hold_*`) and, where another thread reads a prompt, for that thread's turn (`big_prompt`'s `*_hold_*`). Whatever frames
are late beyond the sum of the two is the machine's doing.
"""

import asyncio
import contextlib
import gc
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.big_prompt import Sender, id_bodies, text_bodies
from bench.harness import connect, percentile, stream_request
from windtunnel.serve.flags import parse_args
from windtunnel.serve.server import GC_THRESHOLDS, SimulatorProcess, uvicorn_config
from windtunnel.serve.state import Server

STREAMS = 100
TOKENS = 1000
SETTLE_S = 1.0
MEASURED_S = 6.0
_FLAGS = (
    "bench-model", "--port", "0", "--disable-access-log", "--itl", "20ms", "--max-num-seqs", "2000",
    "--max-model-len", "131072", "--num-gpu-blocks-override", "65536",
)  # fmt: skip


def run() -> dict[str, float]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    results: dict[str, float] = {}
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    async with _server() as port:
        for kind, bodies in (("alone", []), ("text", text_bodies()), ("ids", id_bodies())):
            with _timed_callbacks() as running:
                holds = await asyncio.to_thread(_load, port, bodies, running)
            results[f"hold_p99_ms_{kind}"] = round(percentile(holds, 0.99) / 1e6, 3)
            results[f"hold_p999_ms_{kind}"] = round(percentile(holds, 0.999) / 1e6, 3)
            results[f"hold_max_ms_{kind}"] = round(max(holds) / 1e6, 3)
            results[f"callbacks_{kind}"] = len(holds)
    return results


@contextlib.asynccontextmanager
async def _server() -> Any:
    config = parse_args(list(_FLAGS)).config
    server = Server(config, asyncio.get_running_loop())
    process = SimulatorProcess(uvicorn_config(config, server), server)
    process.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    serving = asyncio.create_task(process.serve())
    async with asyncio.timeout(30):
        await _started(process)
    try:
        yield process.servers[0].sockets[0].getsockname()[1]
    finally:
        process.should_exit = True
        await serving
        server.close()


async def _started(process: SimulatorProcess) -> None:
    while not process.started:  # noqa: ASYNC110 (uvicorn offers a flag and no event)
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _timed_callbacks() -> Iterator[list[int]]:
    """The CPU time of every callback of the loop's thread, in nanoseconds."""
    plain, loop_thread = asyncio.Handle._run, threading.get_ident()
    holds: list[int] = []

    def run(handle: asyncio.Handle) -> None:
        started_ns = time.thread_time_ns()
        plain(handle)
        if threading.get_ident() == loop_thread:
            holds.append(time.thread_time_ns() - started_ns)

    asyncio.Handle._run = run  # type: ignore[method-assign]
    try:
        yield holds
    finally:
        asyncio.Handle._run = plain  # type: ignore[method-assign]


def _load(port: int, bodies: Sequence[bytes], holds: list[int]) -> list[int]:
    """The holds while all streams run and a sender is at work: neither their start nor their end."""
    sockets = connect(port, STREAMS)
    for number in random.Random(1).sample(range(STREAMS), STREAMS):
        sockets[number].sendall(stream_request(TOKENS, number))
    time.sleep(SETTLE_S)
    holds.clear()
    sender = Sender(port, bodies)
    sender.start()
    time.sleep(MEASURED_S)
    sender.end()
    measured = holds.copy()
    for one in sockets:
        one.close()
    return measured


if __name__ == "__main__":
    print(json.dumps(run()))
