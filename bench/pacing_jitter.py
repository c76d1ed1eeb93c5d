"""(g) How even frames come at 5 ms between tokens on 100 streams: the mean gap, and how far gaps and arrivals stray.

The mean gap is taken between the median lateness of a stream's first and of its last quarter: drift shows, one late frame at an
end does not. A gap's jitter is its distance from 5 ms; an arrival's is its distance from the stream's own schedule, the median
over k of arrival_k - k x ITL, plus k x ITL. Streams start in random order, so that they do not all fall due at once; the first
frames, which share the time with the start of the others, do not count.

Rounds are reported one by one, with the load average before each and the time that the hypervisor took from both cores: on a
shared machine the quietest round says what the server does. With WINDTUNNEL_BENCH_REALTIME=1, where the system allows it, server
and client run at real-time priority, so that other jobs of the same machine are not measured too. The result says so.
"""

import os
import random
import statistics
from itertools import pairwise

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, stream_request

STREAMS = 100
ITL_S = 0.005
TOKENS = 700
WARM_UP = 100
ROUNDS = 3
SEED = 1
_TICK_MS = 10
_SERVER = ("--itl", "5ms", "--max-num-seqs", "256", "--max-model-len", "4096", "--num-gpu-blocks-override", "16384")


def run() -> dict[str, object]:
    pin(CLIENT_CORE)
    realtime = os.environ.get("WINDTUNNEL_BENCH_REALTIME") == "1"
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return {"streams": STREAMS, "itl_ms": 1e3 * ITL_S, "realtime": realtime, "rounds": [_round(number) for number in range(ROUNDS)]}


def _round(number: int) -> dict[str, float]:
    load = os.getloadavg()[0]
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    with server(*_SERVER) as (port, _):
        sockets, stolen_ms = connect(port, STREAMS), _stolen_ms()
        for stream in random.Random(SEED + number).sample(range(STREAMS), STREAMS):
            sockets[stream].sendall(stream_request(TOKENS, stream))
        for stream, at, data in drain(sockets, b"0\r\n\r\n"):
            arrivals[stream] += [at] * data.count(b'"text":')
        stolen_ms = _stolen_ms() - stolen_ms
    return {"load_average": round(load, 2), "stolen_ms": stolen_ms, **_figures(arrivals)}


def _stolen_ms() -> int:
    """Time that the hypervisor gave to others; 0 where the system does not say."""
    try:
        with open("/proc/stat") as stat:
            return int(stat.readline().split()[8]) * _TICK_MS
    except OSError:
        return 0


def _figures(arrivals: list[list[float]]) -> dict[str, float]:
    assert all(len(times) >= TOKENS for times in arrivals), f"a stream has only {min(map(len, arrivals))} frames"
    times = [stream[WARM_UP:TOKENS] for stream in arrivals]
    late = [[at - number * ITL_S for number, at in enumerate(stream)] for stream in times]
    means = [1e3 * (ITL_S + _drift(stream)) for stream in late]
    jitters = [1e3 * abs(later - earlier - ITL_S) for stream in times for earlier, later in pairwise(stream)]
    strays = [1e3 * abs(value - middle) for stream in late for middle in [statistics.median(stream)] for value in stream]
    return {
        "mean_gap_ms": round(statistics.fmean(means), 5),
        "worst_stream_mean_ms": round(max(means, key=lambda mean: abs(mean - 1e3 * ITL_S)), 5),
        **{f"gap_jitter_p{share}_ms": round(percentile(jitters, share / 100), 4) for share in (50, 90, 99)},
        "arrival_jitter_p99_ms": round(percentile(strays, 0.99), 4),
    }


def _drift(late: list[float]) -> float:
    """Lateness gained for each token."""
    quarter = len(late) // 4
    return (statistics.median(late[-quarter:]) - statistics.median(late[:quarter])) / (len(late) - quarter)


if __name__ == "__main__":
    print(run())
