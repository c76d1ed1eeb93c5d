"""Tokens per second of one server core: gRPC streaming against HTTP streaming, same process, same engine, in one run.

What a core can do is tokens divided by the CPU time of the server process, so that a client which cannot keep up does not count
against the server. `paced` has one message for each token. `fast` is an engine without pacing: over gRPC what waits for the
reader merges (at most 64 messages wait for each choice), so its tokens per message are told, too. A step costs the engine and
the turn around it, whoever reads; how many tokens share one depends on how close together the requests have come, so the
tokens per step are told for both. `stepped` has steps that all running sequences share, however they came.
"""

import asyncio
import os
import re
import urllib.request
from typing import Any, NamedTuple

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc

from bench.harness import CLIENT_CORE, connect, drain, pin, send_all, server
from windtunnel.ports import free_port

LOADS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "paced": (64, 200, ("--itl", "20ms")),
    "stepped": (64, 200, ("--pacing", "step", "--step-base", "20ms")),
    "fast": (64, 1500, ()),
}
ROUNDS = 3


class Cost(NamedTuple):
    """Of one round. The first member orders rounds."""

    tokens_per_core_s: float
    tokens_per_step: float
    tokens_per_message: float


def run() -> dict[str, Any]:
    """The best round of each, by tokens for a second of CPU time."""
    pin(CLIENT_CORE)
    return {name: _compare(*load) for name, load in LOADS.items()}


def _compare(streams: int, tokens: int, flags: tuple[str, ...]) -> dict[str, Any]:
    http, calls = [], []
    for _ in range(ROUNDS):
        grpc_port = free_port()
        with server("--grpc-port", str(grpc_port), "--max-num-seqs", str(streams), *flags) as (port, pid):
            http.append(_http(port, pid, streams, tokens))
            calls.append(asyncio.run(_grpc(grpc_port, port, pid, streams, tokens)))
    best = {"http": max(http), "grpc": max(calls)}
    told: dict[str, Any] = {"streams": streams}
    for name, cost in best.items():
        told[f"{name}_tokens_per_core_s"] = round(cost.tokens_per_core_s)
        told[f"{name}_cpu_s_per_million_tokens"] = round(1e6 / cost.tokens_per_core_s, 1)
        told[f"{name}_tokens_per_step"] = round(cost.tokens_per_step, 2)
    told["grpc_tokens_per_message"] = round(best["grpc"].tokens_per_message, 2)
    told["ratio"] = round(best["grpc"].tokens_per_core_s / best["http"].tokens_per_core_s, 3)
    return told


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _steps(port: int) -> float:
    """Of the engine so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = re.search(r"^vllm:iteration_tokens_total_count\{.*?\} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _http(port: int, pid: int, streams: int, tokens: int) -> Cost:
    before_steps = _steps(port)
    before_s = _cpu_s(pid)
    sockets = connect(port, streams)
    send_all(sockets, tokens)
    seen = sum(data.count(b"data: {") for _number, _at, data in drain(sockets, b"0\r\n\r\n"))
    spent_s = _cpu_s(pid) - before_s
    assert seen == streams * tokens, f"{seen} frames of {streams * tokens}"
    return Cost(seen / spent_s, seen / (_steps(port) - before_steps), 1)


async def _grpc(grpc_port: int, port: int, pid: int, streams: int, tokens: int) -> Cost:
    before_steps = await asyncio.to_thread(_steps, port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = rpc.VllmEngineStub(channel)
        before_s = _cpu_s(pid)
        counts = await asyncio.gather(*(_read(stub, number, tokens) for number in range(streams)))
        spent_s = _cpu_s(pid) - before_s
    seen, messages = sum(got for got, _ in counts), sum(parts for _, parts in counts)
    assert seen == streams * tokens, f"{seen} tokens of {streams * tokens}"
    steps = await asyncio.to_thread(_steps, port) - before_steps
    return Cost(seen / spent_s, seen / steps, seen / messages)


async def _read(stub: Any, number: int, tokens: int) -> tuple[int, int]:
    """(tokens, messages with tokens) of one stream."""
    params = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    told = pb.GenerateRequest(text=f"bench [wt:{number:x}]", stream=True, sampling_params=params)
    seen = messages = 0
    async for message in stub.Generate(told):
        if message.HasField("chunk"):
            seen += len(message.chunk.token_ids)
            messages += 1
    return seen, messages
