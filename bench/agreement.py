"""One scenario twice: on a live server (a process, over HTTP) and in `sim`. Compares medians and counts.

    python -m bench.agreement [steady] [burst]

`steady`: Poisson arrivals below capacity, every tenth client leaves early. `burst`: a thousand a second for a moment, into a
server that takes 28 at a time.

The live side starts `python -m windtunnel serve` with the same pacing, sends the same prompts at the same times, and aborts
the same requests after the same number of tokens. Before that it measures the front end, with other requests than those that
are compared: how long a batch of requests takes that the server reads and refuses (its serial cost), and what the first token
of lone requests takes beyond the step that makes it (the latency). That is all that the model knows of the machine. Prints one
JSON line: both sides' counts, medians of TTFT, inter-token latency and E2E, and their ratios, the front end and the load
average.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from windtunnel.ports import free_port
from windtunnel.sim.cluster import Cluster
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.scenario import Scenario, parse_scenario
from windtunnel.sim.tokens import random_tokens
from windtunnel.sim.workload import Question
from windtunnel.sim.workloads import make_workload

PATIENCE_S = 30.0
ABORT_EVERY, ABORT_TOKENS = 10, 8


WORKLOADS: dict[str, dict[str, Any]] = {
    "steady": {"kind": "poisson", "rate": 12.0, "requests": 250},
    "burst": {"kind": "constant", "rate": 1000.0, "requests": 60},
}


PACING = {"base": "25ms", "prefill_token": "20us", "decode_seq": "300us"}
PROBE_TOKENS = (50, 400)
"""Prompts of the lone requests."""
PROBES, ROUNDS, BATCH = 20, 5, 30
TOO_MANY_TOKENS = 40_000
CONNECT_AHEAD_S = 0.4
Frontend = dict[str, Any]


def scenario(name: str, frontend: Frontend | None = None) -> Scenario:
    """A step of some 30 ms, so that the live server's own work is small beside it."""
    config = {
        "max_model_len": 32768,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "num_blocks": 16384,
        "max_num_queued_reqs": 28,
    }
    return parse_scenario(
        {
            "engines": [{"config": config, "pacing": PACING, "frontend": frontend or {}}],
            "network": {"client_router": "0", "router_engine": "0", "bandwidth_mbit": 1e9},
            "workload": {"prompt_tokens": "uniform:50:400", "output_tokens": "uniform:10:60", **WORKLOADS[name]},
            "clients": {"abort": {"when": "tokens", "tokens": ABORT_TOKENS}},
            "duration": "1h",
            "metrics": False,
        }
    )


@dataclass(slots=True)
class Side:
    """What the clients of one side have seen. Times in milliseconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)

    def add(self, outcome: str, started: float, times: list[float], ended: float) -> None:
        """Times in seconds."""
        self.outcomes[outcome] += 1
        if outcome == "finished":
            self.ttft_ms.append((times[0] - started) * 1000)
            self.e2e_ms.append((ended - started) * 1000)
            self.itl_ms += [(after - before) * 1000 for before, after in pairwise(times)]

    def medians(self) -> dict[str, float]:
        return {name: round(median(getattr(self, name)), 3) for name in ("ttft_ms", "itl_ms", "e2e_ms")}


def leaves(question: Question) -> bool:
    return question.number % ABORT_EVERY == ABORT_EVERY - 1 and question.output_tokens > 2 * ABORT_TOKENS


def simulated(wanted: Scenario) -> Side:
    side, cluster = Side(), Cluster(wanted, keep_rows=False)
    clients = cluster.clients
    recorded = clients._on_ended

    def ended(call: Any) -> None:
        recorded(call)
        times = [at_ns / 1e9 for at_ns in call.attempts[-1].times_ns]
        side.add(call.outcome, call.started_ns / 1e9, times, call.ended_ns / 1e9)

    clients._on_ended = ended
    clients.leaves = leaves
    cluster.run()
    return side


async def lived(wanted: Scenario) -> tuple[Side, Frontend]:
    side = Side()
    questions = list(make_workload(wanted.workload, Kernel(wanted.seed).stream, wanted.duration).arrivals())
    async with server(wanted) as port:
        frontend = await probe(port, wanted)
        zero_s = time.perf_counter() + 0.5
        async with asyncio.TaskGroup() as tasks:
            for at_ns, question in questions:
                tasks.create_task(ask(port, question, zero_s + at_ns / 1e9, side))
    return side, frontend


async def probe(port: int, wanted: Scenario) -> Frontend:
    """The front end's cost for a request and for a prompt token, and its latency. The first round warms up."""
    short, long = PROBE_TOKENS
    rounds = [[await serial_ms(port, tokens) for tokens in PROBE_TOKENS] for _ in range(1 + ROUNDS)][1:]
    short_ms, long_ms = (median(one[at] for one in rounds) for at in range(2))
    token_ms = max(0.0, (long_ms - short_ms) / (long - short))
    request_ms = max(0.0, short_ms - token_ms * short)
    lone_ms = median([await lone_extra_ms(port, wanted, long) for _ in range(PROBES)])
    latency_ms = max(0.0, lone_ms - request_ms - token_ms * long)
    values = {"request": request_ms, "prompt_token": token_ms, "latency": latency_ms}
    return {name: f"{round(value_ms * 1e6)}ns" for name, value_ms in values.items()}


async def lone_extra_ms(port: int, wanted: Scenario, tokens: int) -> float:
    """What the first token of a lone request takes beyond the step that makes it."""
    side, pacing = Side(), wanted.engines[0].pacing
    prompt = random_tokens(Random(time.perf_counter_ns()), tokens)
    await ask(port, Question(-1, prompt, 1), time.perf_counter() + 0.02, side)
    return side.ttft_ms[0] - (pacing.base + pacing.prefill_token * tokens) / 1e6


async def serial_ms(port: int, tokens: int) -> float:
    """Time for each of `BATCH` requests at once that need no engine: the server reads them and finds max_tokens too large."""
    request = encoded(Question(-1, random_tokens(Random(tokens), tokens), TOO_MANY_TOKENS))
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(BATCH)]
    started_s = time.perf_counter()
    for _reader, writer in streams:
        writer.write(request)
    for reader, _writer in streams:
        status = await reader.readline()
        assert b" 400 " in status, f"the probe was answered {status!r}"
    took_s = time.perf_counter() - started_s
    for _reader, writer in streams:
        writer.close()
    return took_s * 1000 / BATCH


def arguments(wanted: Scenario, port: int) -> list[str]:
    """Of a server with the scenario's engine."""
    engine = wanted.engines[0]
    flags = {
        "model": "m",
        "port": port,
        "pacing": "step",
        "step-base": f"{engine.pacing.base}ns",
        "step-prefill-token": f"{engine.pacing.prefill_token}ns",
        "step-decode-seq": f"{engine.pacing.decode_seq}ns",
        **{name.replace("_", "-"): value for name, value in engine.config.items() if name != "num_blocks"},
        "num-gpu-blocks-override": engine.config["num_blocks"],
    }
    return ["--disable-access-log", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]


@contextlib.asynccontextmanager
async def server(wanted: Scenario) -> AsyncIterator[int]:
    """Live, on a free port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "windtunnel", "serve", *arguments(wanted, port),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await _healthy(port):  # noqa: ASYNC110 (another process: there is nothing to wait for)
                await asyncio.sleep(0.05)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _healthy(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


async def ask(port: int, question: Question, at_s: float, side: Side) -> None:
    """One streamed completion, sent at `at_s`; the socket is open beforehand."""
    request = encoded(question)
    await asyncio.sleep(max(0.0, at_s - time.perf_counter() - CONNECT_AHEAD_S))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    started_s = time.perf_counter()
    writer.write(request)
    status = int((await reader.readline()).split()[1])
    outcome, times = ("refused", []) if status == 503 else await _read(reader, ABORT_TOKENS if leaves(question) else None)
    side.add(outcome, started_s, times, time.perf_counter())
    writer.close()


def encoded(question: Question) -> bytes:
    body = {
        "model": "m",
        "prompt": list(question.prompt_token_ids),
        "max_tokens": question.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _read(reader: asyncio.StreamReader, limit: int | None) -> tuple[str, list[float]]:
    """Times of the frames with a token, until `[DONE]` or `limit` of them."""
    times: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"text":""' not in line:
            times.append(time.perf_counter())
            if len(times) == limit:
                return "aborted", times
        elif line.startswith(b"data: [DONE]"):
            return "finished", times
    return "failed", times


def compare(name: str) -> dict[str, Any]:
    live, frontend = asyncio.run(lived(scenario(name)))
    sim = simulated(scenario(name, frontend))
    medians = {"live": live.medians(), "sim": sim.medians()}
    ratios = {measure: round(medians["live"][measure] / value, 4) for measure, value in medians["sim"].items()}
    counts = {"live": dict(sorted(live.outcomes.items())), "sim": dict(sorted(sim.outcomes.items()))}
    return {
        "counts": counts,
        "medians": medians,
        "live_over_sim": ratios,
        "frontend": frontend,
        "load_average": round(os.getloadavg()[0], 1),
    }


def run() -> dict[str, Any]:
    """For `make bench`."""
    return {name: compare(name) for name in WORKLOADS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *WORKLOADS], default=[])
    for name in parser.parse_args().names or WORKLOADS:
        print(json.dumps({"scenario": name, **compare(name)}))


if __name__ == "__main__":
    main()
