"""A vLLM server with a KV connector: the engines are made with their sockets, and connected at the start."""

import logging
import random
import socket
from functools import partial
from typing import Any

from windtunnel.core.pacing import Pacing
from windtunnel.core.physics import MODELS
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.driver import EngineDriver
from windtunnel.serve.operations.endpoint import Call, Reply, Row, Simple, get, json_reply
from windtunnel.serve.seams import Seams
from windtunnel.serve.sglang.sockets import RankSockets
from windtunnel.serve.state import Server
from windtunnel.serve.transfer import sim_backend
from windtunnel.serve.vllm import VllmFlavour
from windtunnel.serve.vllm_pd.memory import NO_REGION, HeldBytes, NixlMemory, NixlMover
from windtunnel.serve.vllm_pd.settings import core_config
from windtunnel.serve.vllm_pd.side_channel import SideChannel
from windtunnel.serve.vllm_pd.transport import Mover, NixlTransport, SimMover
from windtunnel.wire.vllm.metrics import VllmMetrics

log = logging.getLogger("windtunnel.serve")

_NOT_COVERED = frozenset({"generate"})
"""Families whose refusals tell nobody (reference §7.2)."""
_HOLDS_SHOWN = 1000


class Connection:
    """One rank's engine and what connects it. Owned by its flavour; `attach`, `start`, and `close` in the end."""

    def __init__(
        self, told: ServeConfig, engine: VllmEngineConfig, pacing: Pacing, chance: random.Random, rank: int, seams: Seams
    ) -> None:
        """Binds the sockets. Raises ValueError, OSError."""
        settings = told.kv_transfer
        host = numeric(settings.side_channel_host)
        self.sockets = RankSockets(host, 1)
        port = settings.side_channel_port
        self.channel = SideChannel(self.sockets.context, host, port + rank if port else 0)
        config = core_config(
            settings,
            rank=rank if told.data_parallel_size > 1 else None,
            port=self.channel.port,
            model=told.model,
            version=told.vllm_version,
            block_size=engine.block_size,
            kv_bytes_per_token=round(MODELS[told.pacing.gpu_model].kv_bytes_per_token),
            time_scale=told.pacing.time_scale,
            change=seams.disagg_config,
        )
        self.engine = ConnectorEngine(engine, pacing, config)
        self._memory: NixlMemory | None = None
        self._held: HeldBytes | None = None
        self._mover: Mover = SimMover(sim_backend(settings, told.pacing.time_scale, random.Random(chance.random())))
        if settings.backend == "nixl":
            self._memory = NixlMemory(config.engine_id, engine.num_blocks, settings.nixl_block_bytes)
            self._mover = NixlMover(self.engine, self._memory)
            self._held = HeldBytes(self.engine, self._memory)
        self._time_scale = told.pacing.time_scale
        self.transport: NixlTransport | None = None
        self._driver: EngineDriver | None = None

    async def start(self, driver: EngineDriver, metrics: VllmMetrics) -> None:
        region = NO_REGION if self._memory is None else self._memory.region
        self.transport = NixlTransport(
            self.engine, self.channel, self.sockets, self._mover, driver.wake, self._time_scale, region
        )
        self._driver = driver
        await self.transport.start()
        if self._memory is not None:
            self.transport.spawn(self._memory.progress())
        driver.after_turn = partial(self._after_turn, self.transport, driver.rank, metrics)
        log.info("side channel of engine %s: %s", self.engine.connector.config.engine_id, self.channel.port)
        driver.wake()

    def _after_turn(self, transport: NixlTransport, rank: int, metrics: VllmMetrics) -> None:
        if self._held is not None:
            self._held.update()
        transport.pump()
        if observed := self.engine.take_observations():
            metrics.on_transfers(rank, observed)

    async def close(self) -> None:
        if self.transport is None or self._driver is None:
            self.channel.close()
            self.sockets.close()
            return
        self._driver.after_turn = _nothing
        await self.transport.close()
        if self._memory is not None:
            self._memory.close()

    def refused(self, kv_transfer: object) -> None:
        if self.engine.release_remote(kv_transfer, now_ns()) and self._driver is not None:
            self._driver.wake()

    def debug(self) -> dict[str, Any]:
        """What is held for others, and on its way (reference §7.2)."""
        connector, at_ns = self.engine.connector, now_ns()
        config = connector.config
        holds = sorted(connector.holds.all(), key=lambda hold: hold.deadline_ns)[:_HOLDS_SHOWN]
        return {
            "mode": config.role,
            "connector": config.connector,
            "engine_id": config.engine_id,
            "load_failure_policy": config.load_failure_policy,
            "outstanding": self.engine.outstanding(),
            "counters": [dict(connector.counters)],
            "holds": [
                {
                    "request_id": hold.request_id,
                    "blocks": hold.blocks,
                    "lease_ms": (hold.deadline_ns - at_ns) / 1e6,
                    "reported": hold.reported,
                    "renewable": hold.renewable,
                }
                for hold in holds
            ],
            "transport": {} if self.transport is None else self.transport.debug(),
        }


class KvTransferFlavour(VllmFlavour):
    """One server with a KV connector. Owns its connections."""

    def __init__(self, config: ServeConfig, seams: Seams) -> None:
        self._config = config
        self._seams = seams
        self._connections: list[Connection] = []

    def engine(self, config: VllmEngineConfig, pacing: Pacing, chance: random.Random) -> ConnectorEngine:
        """Binds the rank's sockets. Raises UsageError."""
        try:
            one = Connection(self._config, config, pacing, chance, len(self._connections), self._seams)
        except (ValueError, OSError, MemoryError) as error:
            raise UsageError(f"--kv-transfer-config: {error}") from error
        if ignored := self._config.kv_transfer.parsed("-").ignored:
            log.warning("--kv-transfer-config: %s mean nothing here", ", ".join(ignored))
        self._connections.append(one)
        return one.engine

    async def start(self, server: Server) -> None:
        for one, driver in zip(self._connections, server.driver.drivers, strict=True):
            await one.start(driver, server.metrics)

    async def stop(self) -> None:
        for one in self._connections:
            await one.close()

    def refused(self, server: Server, family: str, kv_transfer: object) -> None:
        if family not in _NOT_COVERED:
            self._connections[0].refused(kv_transfer)

    def rows(self, server: Server) -> list[Row]:
        def debug(_server: Server, _call: Call) -> Reply:
            return json_reply([one.debug() for one in self._connections])

        rule = get("/debug/disaggregation", debug)
        return [*super().rows(server), (rule.path, rule.methods, Simple(server, rule))]


def numeric(host: str) -> str:
    """An address that can be bound; IPv4 first. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _nothing() -> None:
    """What a driver calls when there is no transport."""
