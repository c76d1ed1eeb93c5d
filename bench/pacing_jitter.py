"""(g) How even frames come at 5 ms between tokens on 100 streams: the mean gap, and how far gaps and arrivals stray.

A gap's jitter is its distance from 5 ms. An arrival's is its distance from the stream's own schedule: the median over k of
arrival_k - k x ITL, plus k x ITL. Streams start in random order, so that they do not all fall due at once. Rounds are reported
one by one, with the load average before each: on a shared machine the quietest round says what the server does.
"""

import os
import random
import statistics
from itertools import pairwise

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, stream_request

STREAMS = 100
ITL_S = 0.005
TOKENS = 600
ROUNDS = 3
SEED = 1


def run() -> dict[str, object]:
    pin(CLIENT_CORE)
    rounds = [_round(number) for number in range(ROUNDS)]
    return {"streams": STREAMS, "itl_ms": 1e3 * ITL_S, "rounds": rounds}


def _round(number: int) -> dict[str, float]:
    load = os.getloadavg()[0]
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    with server("--itl", "5ms", "--max-num-seqs", "256", "--max-model-len", "4096", "--num-gpu-blocks-override", "16384") as (
        port,
        _,
    ):
        sockets = connect(port, STREAMS)
        for stream in random.Random(SEED + number).sample(range(STREAMS), STREAMS):
            sockets[stream].sendall(stream_request(TOKENS, stream))
        for stream, at, data in drain(sockets, b"0\r\n\r\n"):
            arrivals[stream] += [at] * data.count(b'"text":')
    return {"load_average": round(load, 2), **_figures(arrivals)}


def _figures(arrivals: list[list[float]]) -> dict[str, float]:
    assert all(len(times) >= TOKENS for times in arrivals), f"a stream has only {min(map(len, arrivals))} frames"
    times = [stream[:TOKENS] for stream in arrivals]
    gaps = [1e3 * (later - earlier) for stream in times for earlier, later in pairwise(stream)]
    means = [1e3 * (stream[-1] - stream[0]) / (TOKENS - 1) for stream in times]
    strays = [1e3 * abs(stray) for stream in times for stray in _strays(stream)]
    return {
        "mean_gap_ms": round(statistics.fmean(means), 5),
        "worst_stream_mean_ms": round(max(means, key=lambda mean: abs(mean - 1e3 * ITL_S)), 5),
        "gap_jitter_p50_ms": round(percentile([abs(gap - 1e3 * ITL_S) for gap in gaps], 0.5), 4),
        "gap_jitter_p99_ms": round(percentile([abs(gap - 1e3 * ITL_S) for gap in gaps], 0.99), 4),
        "arrival_jitter_p99_ms": round(percentile(strays, 0.99), 4),
    }


def _strays(times: list[float]) -> list[float]:
    offsets = [at - number * ITL_S for number, at in enumerate(times)]
    middle = statistics.median(offsets)
    return [offset - middle for offset in offsets]
