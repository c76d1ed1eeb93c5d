"""How much one core of the lab can read and check, and how promptly a thousand clients leave.

2,000 streams are open at once: 1,000 victims that leave at their third token and 1,000 survivors that are read to the end and
checked word by word. Lateness is from the arrival of the third token to the end of the connection.
"""

import asyncio
import resource
from dataclasses import replace
from typing import Any

from bench.harness import CLIENT_CORE, pin, server
from windtunnel.core.units import MS, S
from windtunnel.lab.connection import How
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Limits, Moment, Role, Shape, StormPlan, Trigger
from windtunnel.lab.record import StormResult
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target

VICTIMS, SURVIVORS, TOKENS_LEFT_AT = 1_000, 1_000, 3
PLAN = StormPlan(
    victims=VICTIMS,
    survivors=SURVIVORS,
    how=(How.FIN, How.RST),
    when=Trigger(Moment.TOKENS, TOKENS_LEFT_AT),
    victim=Shape(max_tokens=64),
    survivor=Shape(max_tokens=24),
    bystanders=0,
    later=0,
    sample_every_ns=250 * MS,
    quiet_deadline_ns=30 * S,
    request_timeout_ns=120 * S,
    limits=Limits(5_000, 2_500, 300 * S),
)


def run(clients: int = 1) -> dict[str, Any]:
    """With several client processes they share the lab's core, so that the costs can be compared."""
    flags = ("--itl", "400ms", "--ttft", "3s", "--max-num-seqs", "4096", "--max-num-batched-tokens", "65536")
    with server(*flags) as (port, _):
        pin(CLIENT_CORE)
        before_s = _cpu_s()
        result = asyncio.run(run_storm(make_target(f"http://127.0.0.1:{port}", "bench-model"), replace(PLAN, clients=clients)))
        spent_s = _cpu_s() - before_s
    return {"clients": clients, **report(result), "lab_cpu_s": round(spent_s, 2)}


def _cpu_s() -> float:
    """Of this process and of the client processes that have ended; the server has not."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def report(result: StormResult) -> dict[str, Any]:
    victims, survivors = result.of(Role.VICTIM), result.of(Role.SURVIVOR)
    at = TOKENS_LEFT_AT - 1
    late_ms = sorted((one.left_ns - one.frame_ns[at]) / MS for one in victims if one.left_ns and len(one.frame_ns) > at)
    return {
        "open_at_once": max(sample.clients for sample in result.samples),
        "survivors_complete": sum(one.complete for one in survivors),
        "words_checked": sum(len(one.words) for one in result.streams),
        "victims_left": len(late_ms),
        "late_ms_p50": round(late_ms[len(late_ms) // 2], 2),
        "late_ms_max": round(late_ms[-1], 2),
        "within_50_ms": sum(late < 50 for late in late_ms),
        "findings": [one.name for one in find(result)],
        "wall_s": round(result.phases[-1].ended_ns / S, 1),
    }
