"""How many simulated requests one core runs in a minute: 16 engines, 200 output tokens, Poisson arrivals.

    python bench/sim_cluster.py [--requests N] [--rate R] [--metrics]

Prints one JSON line. CPU time of this process counts, start-up and imports do not.
"""

import argparse
import json
import platform
import time

from windtunnel.sim.cluster import run
from windtunnel.sim.scenario import Scenario, parse_scenario


def scenario(requests: int, rate: float, policy: str, *, metrics: bool) -> Scenario:
    return parse_scenario(
        {
            "engines": [{"count": 16}],
            "policy": policy,
            "workload": {"rate": rate, "requests": requests, "prompt_tokens": 256, "output_tokens": 200},
            "duration": "24h",
            "metrics": metrics,
            "timeline_requests": 0,
        }
    )


def measure(requests: int, rate: float, policy: str, *, metrics: bool) -> dict[str, object]:
    wanted = scenario(requests, rate, policy, metrics=metrics)
    started_s = time.process_time()
    summary = run(wanted, keep_rows=False).summary
    cpu_s = time.process_time() - started_s
    assert summary["requests"]["finished"] == requests
    running = [engine["peak_running"] for engine in summary["engines"]]
    return {
        "requests": requests,
        "rate_per_s": rate,
        "policy": policy,
        "metrics": metrics,
        "peak_running": max(running),
        "cpu_s": round(cpu_s, 2),
        "requests_per_minute_of_one_core": round(requests / cpu_s * 60),
        "output_tokens_per_cpu_s": round(summary["itl"]["count"] / cpu_s),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--policy", default="least-load")
    parser.add_argument("--metrics", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.requests, chosen.rate, chosen.policy, metrics=chosen.metrics)))


if __name__ == "__main__":
    main()
