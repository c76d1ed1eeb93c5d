"""Writes the tables of docs/calibration.md: python -m bench.calibration [NAME…]

Each table is one `windtunnel calibrate` of the recorded trace (`$WINDTUNNEL_GOLDEN/vllm/trace.jsonl`) beside what other jobs
took of its machine (`trace_cpu.jsonl`), printed as it comes, misses included, between the marks <!-- NAME --> and
<!-- /NAME --> of the page. Not part of `make bench`: it takes minutes.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from windtunnel.sim.calibrate.replay import EngineLimits

PAGE = Path(__file__).parent.parent / "docs" / "calibration.md"
TRACE = Path(os.environ.get("WINDTUNNEL_GOLDEN", "../shared/golden")) / "vllm" / "trace.jsonl"
LIMITS = EngineLimits(max_num_seqs=16, max_num_batched_tokens=2048, block_size=32)
SERVER = (
    *(word for name in LIMITS.__slots__ for word in (f"--{name.replace('_', '-')}", str(getattr(LIMITS, name)))),
    *("--cores", "2", "--cpu", "trace_cpu.jsonl"),
    *("--seed", "1"),
)
TABLES = {
    "all-passes": ("--fit-concurrency", "1,8"),
    "pass-0": ("--only", "pass 0", "--fit-concurrency", "1,16"),
    "pass-0-extrapolated": ("--only", "pass 0", "--fit-concurrency", "1,4"),
}


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        command = ["calibrate", TRACE.name, *TABLES[name], *SERVER]
        table = _calibrated(command)
        shown = " ".join(f"'{word}'" if " " in word else word for word in command)
        _replace(name, f"`windtunnel {shown}`, {time.strftime('%Y-%m-%d')}:\n\n{table}")


def _calibrated(command: Sequence[str]) -> str:
    found = [str(TRACE.parent / word) if word.endswith(".jsonl") else word for word in command]
    return subprocess.run(
        [sys.executable, "-m", "windtunnel", *found], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def _replace(name: str, content: str) -> None:
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = PAGE.read_text("utf-8")
    new, count = re.subn(f"{marks[0]}.*?{marks[1]}", lambda _match: f"{marks[0]}\n{content}\n{marks[1]}", page, flags=re.DOTALL)
    if not count:
        raise SystemExit(f"{PAGE.name} has no place for the table {name}")
    PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
