"""(b) How late frames are against their schedule, at 200 and 1,000 streams with 20 ms between tokens.

A stream's schedule is its own best alignment: frame k is due at min over j of (arrival_j - j x ITL) + k x ITL. Streams start
one by one at random moments within a second or so, as clients do that know nothing of each other; frames count from half a
second after the last has started, so that reading requests is not part of the figure.
"""

import time

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, start_streams

ITL_S = 0.020
TOKENS = 250
START_S = 1.0
SETTLE_S = 0.5


def run() -> dict[str, float]:
    pin(CLIENT_CORE)
    return {key: value for streams in (200, 1000) for key, value in _lateness(streams).items()}


def _lateness(streams: int) -> dict[str, float]:
    flags = ("--itl", "20ms", "--max-num-seqs", "2000", "--max-model-len", "4096", "--num-gpu-blocks-override", "65536")
    arrivals: list[list[tuple[int, float]]] = [[] for _ in range(streams)]
    counts = [0] * streams
    with server(*flags) as (port, _):
        sockets = connect(port, streams)
        start_streams(sockets, TOKENS, START_S)
        from_s = time.perf_counter() + SETTLE_S
        for number, at, data in drain(sockets, b"0\r\n\r\n"):
            for _ in range(data.count(b"data: {")):
                if at >= from_s:
                    arrivals[number].append((counts[number], at))
                counts[number] += 1
    late_ms = [1e3 * late for frames in arrivals for late in _late(frames)]
    return {
        f"p50_ms_{streams}": round(percentile(late_ms, 0.5), 3),
        f"p99_ms_{streams}": round(percentile(late_ms, 0.99), 3),
        f"frames_{streams}": len(late_ms),
    }


def _late(frames: list[tuple[int, float]]) -> list[float]:
    start = min((at - number * ITL_S for number, at in frames), default=0.0)
    return [at - number * ITL_S - start for number, at in frames]
