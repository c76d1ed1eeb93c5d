"""(b) How late frames are against their schedule, at 200 and 1,000 streams with 20 ms between tokens.

A stream's schedule is its own best alignment: frame k is due at min over j of (arrival_j - j x ITL) + k x ITL.
"""

import random

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, stream_request

ITL_S = 0.020
TOKENS = 150


def run() -> dict[str, float]:
    pin(CLIENT_CORE)
    return {key: value for streams in (200, 1000) for key, value in _lateness(streams).items()}


def _lateness(streams: int) -> dict[str, float]:
    flags = ("--itl", "20ms", "--max-num-seqs", "2000", "--max-model-len", "4096", "--num-gpu-blocks-override", "65536")
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    chance = random.Random(1)
    with server(*flags) as (port, _):
        sockets = connect(port, streams)
        for number in chance.sample(range(streams), streams):
            sockets[number].sendall(stream_request(TOKENS, number))
        for number, at, data in drain(sockets, b"0\r\n\r\n"):
            arrivals[number] += [at] * data.count(b"data: {")
    late_ms = [1e3 * late for times in arrivals for late in _late(times)]
    return {f"p50_ms_{streams}": round(percentile(late_ms, 0.5), 3), f"p99_ms_{streams}": round(percentile(late_ms, 0.99), 3)}


def _late(times: list[float]) -> list[float]:
    start = min(at - number * ITL_S for number, at in enumerate(times))
    return [at - number * ITL_S - start for number, at in enumerate(times)]
