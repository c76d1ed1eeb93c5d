"""A P/D worker's side of the seam in `serve.flavour`: the workers are made with their sockets, and connected at the start."""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from windtunnel.core.outputs import StepOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.loop import SglangLoop
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.units import S
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.operations.endpoint import Call, Reply, Row, Simple, get, json_reply
from windtunnel.serve.pd.http_client import NoAnswer
from windtunnel.serve.ranks import Placer
from windtunnel.serve.seams import Seams
from windtunnel.serve.sglang.flavour import SglangFlavour, log_batches
from windtunnel.serve.sglang.pd import Disaggregation
from windtunnel.serve.sglang.placement import PrefillPlacer
from windtunnel.serve.state import Server
from windtunnel.wire.sglang.metrics import DISAGG_ROWS, SglangMetrics

log = logging.getLogger("windtunnel.serve")

_LOGGED = ("Prefill bootstrap failed", "Prefill transfer failed", "Decode handshake failed", "Decode transfer failed")
"""Lines that operators of the real server search for (reference §3.1, §3.2)."""
_COUNTERS = {f"{row.name}_total": row.name for row in DISAGG_ROWS if row.kind == "counter"}


class DisaggFlavour(SglangFlavour):
    """One prefill or decode server. Owns its connections."""

    def __init__(self, config: ServeConfig, seams: Seams) -> None:
        super().__init__()
        self._config = config
        self._seams = seams
        self._parts: list[Disaggregation] = []
        release = profile(config.sglang.profile)
        self.engine_type = config.disagg.mode
        self.renamed = {
            "num_prefill_bootstrap_queue_reqs": release.bootstrap_gauge,
            "num_prefill_inflight_queue_reqs": release.inflight_gauge,
        }

    def engine(self, config: SglangEngineConfig, pacing: Pacing, chance: random.Random) -> SglangLoop:
        """Binds the rank's sockets. Raises UsageError."""
        told = self._config
        try:
            part = Disaggregation(
                replace(told.disagg, profile=told.sglang.profile),
                config,
                pacing,
                chance,
                host=told.host,
                tp_size=told.sglang.tp_size,
                dp=(len(self._parts), told.data_parallel_size),
                time_scale=told.pacing.time_scale,
                seed=told.seed + len(self._parts),
                change_config=self._seams.disagg_config,
                change_backend=self._seams.transfer_backend,
            )
        except (ValueError, OSError) as error:
            raise UsageError(f"--disaggregation-mode {told.disagg.mode}: {error}") from error
        self._parts.append(part)
        return part.worker

    def placer(self, engines: Sequence[SglangLoop]) -> Placer:
        """A decode's ranks are balanced as those of a unified server: the reference has a rule for the prefill only."""
        told = self._config.disagg
        return PrefillPlacer(told.load_balance_method, engines) if told.mode == "prefill" else super().placer(engines)

    async def start(self, server: Server) -> None:
        """The first rank has the bootstrap server, with which all of them register."""
        log_batches(server)
        for part, driver in zip(self._parts, server.driver.drivers, strict=True):
            part.attach(driver)
            driver.observe(DisaggObserver(part, server.metrics))
            try:
                await part.start(server.config.port or None, self._parts[0].bootstrap_url)
            except (NoAnswer, OSError) as error:
                raise UsageError(f"--disaggregation-bootstrap-port: {error}") from error
            self._seams.connected(part.worker)
            driver.wake()

    async def stop(self) -> None:
        for part in self._parts:
            await part.close()

    def rows(self, server: Server) -> list[Row]:
        def debug(_server: Server, _call: Call) -> Reply:
            return json_reply([part.debug() for part in self._parts])

        rule = get("/debug/disaggregation", debug)
        return [*super().rows(server), (rule.path, rule.methods, Simple(server, rule))]


class DisaggObserver:
    """Feeds the P/D metrics from what the worker counts and observes."""

    def __init__(self, part: Disaggregation, metrics: SglangMetrics) -> None:
        self._worker = part.worker
        self._metrics = metrics
        self._told: Counter[str] = Counter()

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        for key, value in self._worker.counters(0).items():
            name, _, label = key.partition(":")
            if value != self._told[key] and name in _COUNTERS:
                self._metrics.count(rank, _COUNTERS[name], value - self._told[key], *([label] if label else []))
                self._told[key] = value
        for transition in step.transitions:
            reason = str((transition.detail or {}).get("reason", ""))
            if reason.startswith(_LOGGED):
                log.error("%.3f s: %s", transition.at_ns / S, reason)
        for name, observed in self._worker.take_observations():
            self._metrics.observe(rank, name, observed)
