"""(d) From the start of the process to the first 200 of /health."""

import time

from bench.harness import launch, wait_ready
from windtunnel.ports import free_port

RUNS = 7


def run() -> dict[str, float]:
    times = []
    for _ in range(RUNS):
        port = free_port()
        started = time.perf_counter()
        process = launch(port, ())
        try:
            wait_ready(port, process)
            times.append(time.perf_counter() - started)
        finally:
            process.terminate()
            process.wait(10)
    return {"median_s": round(sorted(times)[RUNS // 2], 3), "max_s": round(max(times), 3)}
