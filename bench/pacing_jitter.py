"""(g) How even frames come at 5 ms between tokens on 100 streams: the mean gap, and how far gaps and arrivals stray.

The mean gap is taken between the median lateness of a stream's first and of its last quarter: drift shows, one late frame at an
end does not. A gap's jitter is its distance from 5 ms; an arrival's is its distance from the stream's own schedule, the median
over k of arrival_k - k x ITL, plus k x ITL. Streams start one by one at random times within half a second, as clients do that
know nothing of each other: started together they would fall due, and fill their KV blocks, together too. The first frames do
not count.

Each round is followed by the same of a bare loop: a process that sleeps to the next deadline and writes a frame of the
same size, and nothing else. What the bare loop strays is the machine's (other jobs, a hypervisor that takes its cores away for
milliseconds). With WINDTUNNEL_BENCH_REALTIME=1, where the system allows it, both and the client run at real-time priority.
"""

import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from bench.harness import CLIENT_CORE, SERVER_CORE, connect, drain, percentile, pin, server, stream_request

STREAMS = 100
ITL_S = 0.005
TOKENS = 700
WARM_UP = 150
_BETWEEN_STARTS_S = 0.005
ROUNDS = 5
SEED = 1
_TICK_MS = 10
_GROUPS = 10
"""Streams of the bare loop that fall due together: it has no time to sleep for each."""
_END = b"0\r\n\r\n"
_FRAME = b"data: {".ljust(260, b"x")
_SERVER = ("--itl", "5ms", "--max-num-seqs", "256", "--max-model-len", "4096", "--num-gpu-blocks-override", "16384")


def run() -> dict[str, object]:
    pin(CLIENT_CORE)
    realtime = os.environ.get("WINDTUNNEL_BENCH_REALTIME") == "1"
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    rounds = [{"server": _measured(_served, number), "bare": _measured(_bare, number)} for number in range(ROUNDS)]
    return {"streams": STREAMS, "itl_ms": 1e3 * ITL_S, "realtime": realtime, "rounds": rounds}


def _measured(arrive: Callable[[int], list[list[float]]], number: int) -> dict[str, float]:
    load, stolen_ms = os.getloadavg()[0], _stolen_ms()
    figures = _figures(arrive(number))
    return {"load_average": round(load, 2), "stolen_ms": _stolen_ms() - stolen_ms, **figures}


def _served(number: int) -> list[list[float]]:
    with server(*_SERVER) as (port, _):
        sockets = connect(port, STREAMS)
        chance = random.Random(SEED + number)
        for stream in range(STREAMS):
            time.sleep(chance.uniform(0, 2 * _BETWEEN_STARTS_S))
            sockets[stream].sendall(stream_request(TOKENS, stream))
        return _arrivals(sockets, b'"text":')


def _bare(number: int) -> list[list[float]]:
    pairs = [socket.socketpair() for _ in range(STREAMS)]
    child = os.fork()
    if not child:
        _write_bare([ours for ours, _theirs in pairs], random.Random(SEED + number).sample(range(STREAMS), STREAMS))
        os._exit(0)
    for ours, _theirs in pairs:
        ours.close()
    arrivals = _arrivals([theirs for _ours, theirs in pairs], _FRAME[:7])
    os.waitpid(child, 0)
    return arrivals


def _write_bare(sockets: list[socket.socket], order: list[int]) -> None:
    pin(SERVER_CORE)
    start = time.perf_counter() + 0.1
    for token in range(TOKENS):
        for group in range(_GROUPS):
            time.sleep(max(0.0, start + ITL_S * (token + group / _GROUPS) - time.perf_counter()))
            for stream in order[group::_GROUPS]:
                sockets[stream].send(_FRAME if token < TOKENS - 1 else _FRAME + _END)


def _arrivals(sockets: list[socket.socket], mark: bytes) -> list[list[float]]:
    arrivals: list[list[float]] = [[] for _ in sockets]
    for stream, at, data in drain(sockets, _END):
        arrivals[stream] += [at] * data.count(mark)
    return arrivals


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
