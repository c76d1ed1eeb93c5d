"""`/health` and `/health_generate`: a one-token request, and whether anything came back (SGLang reference §7.6)."""

import asyncio
from typing import Any

from windtunnel.core.outputs import StepOutput, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.disagg.config import FAKE_HOST, FAKE_ROOM
from windtunnel.core.sources import SequenceSource
from windtunnel.core.units import S
from windtunnel.serve.clock import now_ns
from windtunnel.serve.sglang.engines import scaled
from windtunnel.serve.state import Server

LOOK_INTERVAL_NS = 1 * S
PREFIX = "HEALTH_CHECK"


class Heartbeat:
    """Counts what comes back from the scheduler: finished batches and reports. An observer of all ranks' steps."""

    def __init__(self) -> None:
        self.beats = 0

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        self.beats += 1


class _Probe:
    """Nobody waits for its token: that a step has passed is enough."""

    def on_output(self, output: TokenOutput) -> None:
        """Nothing to do."""

    def broken(self) -> None:
        """Nothing to do."""


async def probe(server: Server, beats: Heartbeat, look_ns: int = LOOK_INTERVAL_NS) -> bool:
    """Whether the scheduler is alive. Takes at least one look interval, at most the health-check timeout."""
    scale = server.config.pacing.time_scale
    before = beats.beats
    for driver in server.driver.drivers[:1]:
        if not _busy(driver.engine):
            driver.submit([_request(server)], [_Probe()])
    deadline_ns = now_ns() + scaled(server.config.sglang.health_check_timeout_ns, scale)
    while now_ns() < deadline_ns:
        await asyncio.sleep(scaled(look_ns, scale) / 1e9)
        if beats.beats > before:
            return True
    return False


def _busy(engine: Any) -> bool:
    """A batch runs or somebody waits: the probe is not run, the next batch is the acknowledgement."""
    return engine.batch is not None or bool(engine.scheduler.waiting) or bool(engine.scheduler.running)


def _request(server: Server) -> EngineRequest:
    name = f"{PREFIX}_{server.new_id()}"
    bootstrap = (FAKE_HOST, None, FAKE_ROOM) if server.config.disagg.on else None
    tags = {"family": "health"}
    return EngineRequest(name, (0,), SequenceSource((0,)), max_tokens=1, arrival_ns=now_ns(), bootstrap=bootstrap, tags=tags)
