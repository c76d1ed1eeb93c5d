"""One rank's engine with a KV connector and what connects it: what is the same for every connector, and NIXL's."""

import logging
import random
import socket
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

from windtunnel.core.pacing import Pacing
from windtunnel.core.physics import MODELS
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import ServeConfig
from windtunnel.serve.driver import EngineDriver
from windtunnel.serve.pd.sockets import RankSockets
from windtunnel.serve.seams import Seams
from windtunnel.serve.transfer import sim_backend
from windtunnel.serve.vllm_pd.base import Mover, SimMover, Transport
from windtunnel.serve.vllm_pd.memory import NO_REGION, HeldBytes, NixlMemory, NixlMover
from windtunnel.serve.vllm_pd.settings import core_config
from windtunnel.serve.vllm_pd.side_channel import SideChannel
from windtunnel.serve.vllm_pd.transport import NixlTransport
from windtunnel.wire.vllm.metrics import VllmMetrics

log = logging.getLogger("windtunnel.serve")

_HOLDS_SHOWN = 1000


class Rank(NamedTuple):
    """What an engine is made of."""

    told: ServeConfig
    engine: VllmEngineConfig
    pacing: Pacing
    chance: random.Random
    number: int
    seams: Seams


class Connection(ABC):
    """Owned by its flavour; `start` it, and `close` it in the end."""

    def __init__(self, rank: Rank, host: str) -> None:
        """Binds the sockets. Raises ValueError, OSError."""
        told = rank.told
        self.sockets = RankSockets(host, 1)
        config = core_config(
            told.kv_transfer,
            rank=rank.number if told.data_parallel_size > 1 else None,
            host=host,
            port=self._open(rank, host),
            model=told.model,
            version=told.vllm_version,
            block_size=rank.engine.block_size,
            kv_bytes_per_token=round(MODELS[told.pacing.gpu_model].kv_bytes_per_token),
            time_scale=told.pacing.time_scale,
            change=rank.seams.disagg_config,
        )
        self.engine = ConnectorEngine(rank.engine, rank.pacing, config)
        self.transport: Transport | None = None
        self._time_scale = told.pacing.time_scale
        self._driver: EngineDriver | None = None

    @abstractmethod
    def _open(self, rank: Rank, host: str) -> int:
        """Open what else is needed, and say at which port others find this engine. Raises OSError."""

    @abstractmethod
    def _shut(self) -> None:
        """Close it again, when there has been no transport."""

    async def start(self, driver: EngineDriver, metrics: VllmMetrics) -> None:
        """Raises OSError, and what `_connect` raises."""
        self.transport = self._make_transport(driver)
        self._driver = driver
        await self.transport.start()
        await self._connect(self.transport)
        driver.after_turn = partial(self._after_turn, self.transport, driver.rank, metrics)
        driver.wake()

    @abstractmethod
    def _make_transport(self, driver: EngineDriver) -> Transport: ...

    @abstractmethod
    async def _connect(self, transport: Transport) -> None:
        """Let others find this engine."""

    def _after_turn(self, transport: Transport, rank: int, metrics: VllmMetrics) -> None:
        transport.pump()
        if observed := self.engine.take_observations():
            metrics.on_transfers(rank, observed)

    async def close(self) -> None:
        if self.transport is None or self._driver is None:
            self._shut()
            self.sockets.close()
            return
        self._driver.after_turn = _nothing
        await self.transport.close()

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


class NixlConnection(Connection):
    """With a side channel, and perhaps with real bytes."""

    def __init__(self, rank: Rank) -> None:
        """Raises ValueError, OSError, MemoryError."""
        settings = rank.told.kv_transfer
        super().__init__(rank, numeric(settings.side_channel_host))
        self._memory: NixlMemory | None = None
        self._held: HeldBytes | None = None
        self._mover: Mover = SimMover(sim_backend(settings, self._time_scale, random.Random(rank.chance.random())))
        if settings.backend == "nixl":
            self._memory = NixlMemory(self.engine.connector.config.engine_id, rank.engine.num_blocks, settings.nixl_block_bytes)
            self._mover = NixlMover(self.engine, self._memory)
            self._held = HeldBytes(self.engine, self._memory)

    def _open(self, rank: Rank, host: str) -> int:
        port = rank.told.kv_transfer.side_channel_port
        self.channel = SideChannel(self.sockets.context, host, port + rank.number if port else 0)
        return self.channel.port

    def _shut(self) -> None:
        self.channel.close()

    def _make_transport(self, driver: EngineDriver) -> Transport:
        region = NO_REGION if self._memory is None else self._memory.region
        return NixlTransport(self.engine, self.channel, self.sockets, self._mover, driver.wake, self._time_scale, region)

    async def _connect(self, transport: Transport) -> None:
        if self._memory is not None:
            transport.spawn(self._memory.progress())
        log.info("side channel of engine %s: %s", self.engine.connector.config.engine_id, self.channel.port)

    def _after_turn(self, transport: Transport, rank: int, metrics: VllmMetrics) -> None:
        if self._held is not None:
            self._held.update()
        super()._after_turn(transport, rank, metrics)

    async def close(self) -> None:
        await super().close()
        if self.transport is not None and self._memory is not None:
            self._memory.close()


def numeric(host: str) -> str:
    """An address that can be bound; IPv4 first. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _nothing() -> None:
    """What a driver calls when there is no transport."""
