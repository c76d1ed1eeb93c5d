"""`make bench`: every number of docs/benchmarks.md. One JSON line for each benchmark; name some to run only those."""

import importlib
import json
import platform
import sys
import time

BENCHMARKS = (
    "throughput",
    "lateness",
    "idle_streams",
    "startup",
    "departures",
    "core_step",
    "lab_size",
    "lab_size_spread",
    "sim_cluster",
    "agreement",
    "big_prompt",
    "loop_holds",
    "pacing_jitter",
    "grpc_stream",
)


def main() -> None:
    names = sys.argv[1:] or BENCHMARKS
    print(
        json.dumps(
            {
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    )
    for name in names:
        print(json.dumps({"benchmark": name, **importlib.import_module(f"bench.{name}").run()}), flush=True)


if __name__ == "__main__":
    main()
