"""How long the event loop waits at a time while prompts of 100,000 tokens are worked on, in CPU time: no neighbour counts.

A server runs in this process on asyncio's own loop, every callback of which is timed on the loop thread's clock. 100 streams
with 20 ms between tokens, started at random moments, run; then the same beside long prompts. A frame that falls due waits at
most for the callback under way (`hold_*`) and, where another thread reads a prompt, for that thread's turn: the switch interval
and the longest single bytecode instruction of reading (`instruction_max_*`), since the interpreter changes threads between
instructions only. Whatever frames are late beyond that is the machine's doing.

A hypervisor's time counts as CPU time, too, and on a busy machine many tokens fall due at once. So beside the percentiles
stands `worst_*`: the longest callback in the half second around a long prompt, or in any half second; the median over all.
"""

import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from types import FrameType
from typing import Any

from bench.big_prompt import Sender, id_bodies, text_bodies
from bench.core_step import yardstick_us
from bench.harness import connect, percentile, start_streams
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.serve.config import GenerationConfig
from windtunnel.serve.flags import parse_args
from windtunnel.serve.planning import PrefixReader, prepare
from windtunnel.serve.server import GC_THRESHOLDS, SimulatorProcess, uvicorn_config
from windtunnel.serve.sources import SourceMaker
from windtunnel.serve.state import Server
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.vllm import completions

STREAMS = 100
TOKENS = 2000
START_S = 1.0
SETTLE_S = 1.0
MEASURED_S = 12.0
_TRACES = 3
_FLAGS = (
    "bench-model", "--port", "0", "--disable-access-log", "--itl", "20ms", "--max-num-seqs", "2000",
    "--max-model-len", "131072", "--num-gpu-blocks-override", "65536",
)  # fmt: skip


def run() -> dict[str, float]:
    results = {"yardstick_us": round(yardstick_us())} | asyncio.run(_measure())
    for kind, bodies in (("text", text_bodies(1)), ("ids", id_bodies(1))):
        results[f"instruction_max_ms_{kind}"] = round(_longest_instruction_ns(bodies[0]) / 1e6, 3)
    return results


async def _measure() -> dict[str, float]:
    results: dict[str, float] = {}
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    async with _server() as port:
        for kind, bodies in (("alone", []), ("text", text_bodies(16)), ("ids", id_bodies(16))):
            with _timed_callbacks() as running:
                holds, worst = await asyncio.to_thread(_load, port, bodies, running)
            for name, found in (("", worst),) if kind == "alone" else (("_new", worst[0::2]), ("_repeated", worst[1::2])):
                results[f"worst_ms_{kind}{name}"] = round(median(found) / 1e6, 3)
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


def _load(port: int, bodies: Sequence[bytes], holds: list[int]) -> tuple[list[int], list[int]]:
    """All holds while all streams run and a sender is at work, neither their start nor their end; the longest of each span."""
    sockets = connect(port, STREAMS)
    start_streams(sockets, TOKENS, START_S)
    time.sleep(SETTLE_S)
    holds.clear()
    worst = [max(holds[begin:end], default=0) for begin, end in _spans(port, bodies, holds)]
    measured = holds.copy()
    for one in sockets:
        one.close()
    return measured, worst


def _spans(port: int, bodies: Sequence[bytes], holds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Which holds belong to each long prompt and the pause before it; without prompts, to each half second."""
    until_s = time.perf_counter() + MEASURED_S
    begin = 0
    answers: Iterable[object] = Sender(port, bodies).send(until_s) if bodies else _pauses(until_s)
    for _answer in answers:
        end = len(holds)
        yield begin, end
        begin = end


def _pauses(until_s: float) -> Iterator[None]:
    while time.perf_counter() < until_s:
        time.sleep(0.5)
        yield


def _longest_instruction_ns(body: bytes) -> int:
    """CPU time of the longest single instruction while a body is read as the server reads it; the best of some runs."""
    tokenizer = BuiltinTokenizer()
    env = ServerEnv(("bench-model",), tokenizer, 131072, lambda: "0" * 16, lambda: 0)
    prefix = PrefixReader(BlockHasher("sha256", 16), lambda _hashes: ())
    identity = SourceMaker(GenerationConfig(), tokenizer).identity
    meters = [InstructionMeter() for _ in range(_TRACES)]
    for meter in meters:
        meter.run(lambda: prepare(completions.plan(body, {"content-type": "application/json"}, env), prefix, identity))
    return min(meter.longest_ns for meter in meters)


class InstructionMeter:
    """Times every bytecode instruction of a call."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self._begun_ns = 0

    def run(self, work: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        self._begun_ns = time.thread_time_ns()
        try:
            work()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        self.longest_ns = max(self.longest_ns, time.thread_time_ns() - self._begun_ns)
        frame.f_trace_opcodes = True
        self._begun_ns = time.thread_time_ns()
        return self._trace


if __name__ == "__main__":
    print(json.dumps(run()))
