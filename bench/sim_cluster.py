"""How many simulated requests one core runs in a minute: 16 engines, 200 output tokens, Poisson arrivals.

    python -m bench.sim_cluster [--requests N] [--rate R] [--policy P] [--metrics]

CPU time of this process counts, and wall time is stated beside it; start-up and imports do not count. The yardstick
(100,000 additions in a loop, in the same run) tells how fast the machine was at that moment.
"""

import argparse
import json
import os
import time
from statistics import median
from typing import Any

from windtunnel.sim.cluster import run as run_cluster
from windtunnel.sim.scenario import Scenario, parse_scenario

ENGINES, OUTPUT_TOKENS, PROMPT_TOKENS, SEED = 16, 200, 256, 0


def scenario(requests: int, rate: float, policy: str, *, metrics: bool) -> Scenario:
    return parse_scenario(
        {
            "seed": SEED,
            "engines": [{"count": ENGINES}],
            "policy": policy,
            "workload": {"rate": rate, "requests": requests, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
            "duration": "24h",
            "metrics": metrics,
            "timeline_requests": 0,
        }
    )


def measure(requests: int, rate: float, policy: str, *, metrics: bool) -> dict[str, Any]:
    wanted = scenario(requests, rate, policy, metrics=metrics)
    before_us = yardstick_us()
    started_s, wall_s = time.process_time(), time.monotonic()
    summary = run_cluster(wanted, keep_rows=False).summary
    cpu_s, wall_s = time.process_time() - started_s, time.monotonic() - wall_s
    assert summary["requests"]["finished"] == requests
    return {
        "requests": requests,
        "rate_per_s": rate,
        "policy": policy,
        "metrics": metrics,
        "seed": SEED,
        "peak_running": max(engine["peak_running"] for engine in summary["engines"]),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "requests_per_minute_of_one_core": round(requests / cpu_s * 60),
        "output_tokens_per_cpu_s": round(requests * OUTPUT_TOKENS / cpu_s),
        "yardstick_us": round((before_us + yardstick_us()) / 2),
    }


def yardstick_us() -> float:
    return median(_additions_us() for _ in range(9))


def _additions_us() -> float:
    started_s, total = time.process_time(), 0
    for number in range(100_000):
        total += number
    return (time.process_time() - started_s) * 1e6


def run() -> dict[str, Any]:
    """For `make bench`: without and with the metrics of the live server."""
    return {name: measure(20_000, 300.0, "least-load", metrics=name == "with_metrics") for name in ("plain", "with_metrics")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--policy", default="least-load")
    parser.add_argument("--metrics", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.requests, chosen.rate, chosen.policy, metrics=chosen.metrics)))


if __name__ == "__main__":
    main()
