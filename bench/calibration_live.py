"""A profile played three ways: measured, replayed in virtual time, and by a live server with `--profile`.

    python -m bench.calibration_live PROFILE [RUN…]

RUN is the name of a run of the recorded trace, such as 'pass 0 c=16' (default: all closed loops). The live server gets that
run's requests from as many clients over keep-alive connections, with the pauses between two requests that the trace shows. Its
clients share this machine with it. Not part of `make bench`: it takes as long as the trace, 5 to 10 s a run, and says nothing
on a busy machine.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.calibration import LIMITS, TRACE
from bench.harness import server
from windtunnel.core.profile import Profile, from_mapping
from windtunnel.sim.calibrate.fit import series
from windtunnel.sim.calibrate.formats import read_runs
from windtunnel.sim.calibrate.measured import Measured, Run
from windtunnel.sim.calibrate.prediction import TOLERANCE
from windtunnel.sim.calibrate.replay import replay

Series = Mapping[str, NDArray[np.float64]]

_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_VOCABULARY = range(1000, 2000)
_SEEDS = range(101, 106)
_LIMIT_BYTES = 1 << 20


@dataclass
class Load:
    """What all clients of one run share."""

    port: int
    todo: deque[Measured]
    thinks_ms: Sequence[float]
    draws: random.Random
    done: list[Measured] = field(default_factory=list)

    def prompt(self, one: Measured) -> list[int]:
        """What was cached begins as the warm-up did, the rest is its own."""
        own = self.draws.choices(_VOCABULARY, k=one.prompt_tokens - one.cached_tokens)
        return [*prefix(one.cached_tokens), *own]


def prefix(tokens: int) -> list[int]:
    return [_VOCABULARY[at % len(_VOCABULARY)] for at in range(tokens)]


def encoded(prompt: Sequence[int], max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": "bench-model", "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def client(load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port, limit=_LIMIT_BYTES)
    while load.todo:
        one = load.todo.popleft()
        request = encoded(load.prompt(one), one.output_tokens)
        sent_s = time.perf_counter()
        writer.write(request)
        chunks, e2e_ms = await answer(reader, sent_s)
        load.done.append(Measured(sent_s, one.prompt_tokens, one.output_tokens, chunks, e2e_ms, one.cached_tokens))
        await asyncio.sleep(load.draws.choice(load.thinks_ms) / 1e3)
    writer.close()


async def answer(reader: asyncio.StreamReader, sent_s: float) -> tuple[tuple[tuple[float, int], ...], float]:
    """Chunks as (milliseconds, tokens so far), and the time of the last byte."""
    chunks: list[tuple[float, int]] = []
    while (line := await reader.readline()) != b"0\r\n":
        if not line:
            raise ConnectionError("the server closed the connection")
        counted = _TOKENS.search(line)
        if counted and (not chunks or int(counted[1]) > chunks[-1][1]):
            chunks.append((1e3 * (time.perf_counter() - sent_s), int(counted[1])))
    await reader.readline()
    return tuple(chunks), 1e3 * (time.perf_counter() - sent_s)


async def lived(run: Run, port: int, seed: int) -> Run:
    """The run's requests, sent to the live server."""
    longest = max(one.cached_tokens for one in run.requests)
    if longest:
        warm = Load(port, deque([Measured(0, longest + 1, 1, ((1.0, 1),), 1.0, longest)]), [0.0], random.Random(0))
        await client(warm)
    todo = deque(sorted(run.requests, key=lambda one: one.sent_s))
    load = Load(port, todo, run.thinks_ms or [0.0], random.Random(seed))
    async with asyncio.TaskGroup() as clients:
        for _ in range(run.concurrency or 1):
            clients.create_task(client(load))
    return Run(run.name, run.concurrency, load.done)


def compare(run: Run, profile: Profile, profile_file: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={getattr(LIMITS, name)}" for name in LIMITS.__slots__]
    with server("--profile", profile_file, "--num-gpu-blocks-override", "20000", *flags) as (port, _pid):
        live = series(asyncio.run(lived(run, port, 1)))
    replayed = [series(replay(run, profile, LIMITS, seed=seed)) for seed in _SEEDS]
    measured = series(run)
    cells = [_cell(measured, replayed, live, name, share) for name in ("ttft", "itl", "e2e") for share in TOLERANCE]
    return [run.name, *cells]


def _cell(measured: Series, replayed: Sequence[Series], live: Series, name: str, share: int) -> str:
    ours = [float(np.mean([np.percentile(one[name], share) for one in side])) for side in ([measured], replayed, [live])]
    return " / ".join(f"{value:.2f}" for value in ours) + f" ({100 * (ours[2] / ours[1] - 1):+.0f} %)"


def main() -> None:
    profile_file, *wanted = sys.argv[1:]
    profile = from_mapping(json.loads(Path(profile_file).read_text("utf-8")))
    runs = [run for run in read_runs(TRACE) if run.concurrency is not None and (not wanted or run.name in wanted)]
    heads = [f"{name} p{share}" for name in ("ttft", "itl", "e2e") for share in TOLERANCE]
    print("measured / replay / live in ms (live against replay)\n")
    print(f"| run | {' | '.join(heads)} |\n|" + " --- |" * (len(heads) + 1))
    for run in runs:
        print(f"| {' | '.join(compare(run, profile, profile_file))} |", flush=True)


if __name__ == "__main__":
    main()
