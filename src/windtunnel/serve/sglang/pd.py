"""The P/D side of one live server: sockets, then the worker, then the transport and, on a prefill, the bootstrap server."""

import logging
import uuid
from collections.abc import Callable
from random import Random
from typing import Any

from windtunnel.core.pacing import Pacing
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.transfer.backends import SimBackend, TransferBackend, Write
from windtunnel.serve.beside import Beside
from windtunnel.serve.driver import EngineDriver
from windtunnel.serve.nixl.agent import KvAgent, Move
from windtunnel.serve.nixl.backend import RealBytesBackend
from windtunnel.serve.nixl.memory import BlockMemory
from windtunnel.serve.pd.sockets import RankSockets
from windtunnel.serve.sglang.bootstrap import Bootstrap, build
from windtunnel.serve.sglang.settings import HEARTBEAT_LEAST_NS, DisaggSettings, core_config
from windtunnel.serve.sglang.transport import DecodeTransport, PrefillTransport, TransportConfig
from windtunnel.serve.transfer import sim_backend
from windtunnel.wire.sglang.bootstrap import RouteRegistration
from windtunnel.wire.sglang.frames import encode

log = logging.getLogger("windtunnel.serve")

Plain = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


class Disaggregation:
    """One P/D worker with its connections. Owned by its server; `attach`, `start`, and `close` in the end."""

    def __init__(
        self,
        settings: DisaggSettings,
        engine: SglangEngineConfig,
        pacing: Pacing,
        chance: Chance,
        *,
        host: str = "127.0.0.1",
        tp_size: int = 1,
        dp: tuple[int, int] = (0, 1),
        time_scale: float = 1.0,
        seed: int = 0,
        change_config: Plain = _as_it_is,
        change_backend: Plain = _as_it_is,
    ) -> None:
        """`dp`: this rank's number, and how many there are. Raises ValueError for bad settings.

        `change_config` and `change_backend` are the seams for planted defects.
        """
        self.settings = settings
        self.host = host
        self.time_scale = time_scale
        self.sockets = RankSockets(host, tp_size, settings.listen_sockets if settings.mode == "decode" else 1)
        self.disagg: DisaggConfig = change_config(core_config(settings, self.sockets.endpoints, dp[0], time_scale))
        self._dp = dp
        self._page_size = engine.page_size
        self._fates = Random(seed)
        self.kv_agents = self._make_agents(engine, tp_size) if settings.transfer_backend == "nixl" else []
        self.bootstrap: Bootstrap | None = None
        self.bootstrap_port = settings.bootstrap_port
        self._server: Beside | None = None
        self.worker: PrefillWorker | DecodeWorker
        if settings.mode == "prefill":
            self.worker = PrefillWorker(
                engine, self.disagg, pacing, chance, lambda rank: self._with_bytes(rank, change_backend(self._backend()))
            )
        else:
            self.worker = DecodeWorker(engine, self.disagg, pacing, chance)
        self.transport: PrefillTransport | DecodeTransport

    def _make_agents(self, engine: SglangEngineConfig, ranks: int) -> list[KvAgent]:
        """With memory for each page. A prefill only writes: one block is enough for it."""
        pages = engine.max_total_num_tokens // engine.page_size if self.settings.mode == "decode" else 1
        memories = [BlockMemory(pages, self.settings.nixl_block_bytes) for _ in range(ranks)]
        return [KvAgent(uuid.uuid4().hex, memory) for memory in memories]

    def _with_bytes(self, rank: int, backend: Any) -> TransferBackend:
        return RealBytesBackend(backend, self.kv_agents[rank], _page_move) if self.kv_agents else backend

    def _backend(self) -> SimBackend:
        return sim_backend(self.settings, self.time_scale, self._fates)

    # Life

    def attach(self, driver: EngineDriver) -> None:
        """From now on the driver's turns send what the worker has to say."""
        settings = self.settings
        config = TransportConfig(
            time_scale=self.time_scale,
            zmq_send_timeout_ns=settings.zmq_send_timeout_ns,
            heartbeat_interval_ns=max(HEARTBEAT_LEAST_NS, settings.heartbeat_interval_ns),
        )
        if isinstance(self.worker, PrefillWorker):
            self.transport = PrefillTransport(self.worker, self.sockets, config, driver.wake, self.kv_agents)
        else:
            self.transport = DecodeTransport(self.worker, self.sockets, config, driver.wake, self.kv_agents)
        self._driver = driver

    @property
    def bootstrap_url(self) -> str | None:
        """Of the bootstrap server that runs here."""
        return f"http://{self.host}:{self.bootstrap_port}" if self.bootstrap is not None else None

    async def start(self, http_port: int | None = None, bootstrap_url: str | None = None) -> None:
        """Listen; a prefill registers with that bootstrap server, or starts it if there is none. Raises NoAnswer, OSError."""
        await self.transport.start()
        self._driver.after_turn = self.transport.pump
        if isinstance(self.transport, PrefillTransport):
            url = bootstrap_url or await self._serve_bootstrap()
            await self.transport.register(url, self._registrations(http_port))
        self._driver.wake()

    async def close(self) -> None:
        self._driver.after_turn = _nothing
        await self.transport.close()
        for agent in self.kv_agents:
            agent.close()
        if self._server is not None:
            await self._server.close()

    async def _serve_bootstrap(self) -> str:
        self.bootstrap = Bootstrap(round(self.settings.entry_cleanup_ns / self.time_scale))
        self._server = Beside(build(self.bootstrap), self.host, self.settings.bootstrap_port)
        await self._server.start()
        self.bootstrap_port = self._server.port
        url = self._server.url
        log.info("bootstrap server: %s", url)
        return url

    def _registrations(self, http_port: int | None) -> list[RouteRegistration]:
        size = len(self.sockets.endpoints)
        dp_rank, dp_size = self._dp
        return [
            RouteRegistration(
                attn_tp_size=size,
                attn_tp_rank=rank,
                attn_dp_size=dp_size,
                attn_dp_rank=dp_rank,
                rank_ip=self.host,
                rank_port=int(endpoint.rpartition(":")[2]),
                page_size=self._page_size,
                load_balance_method=self.settings.load_balance_method,
                prefill_http_port=http_port,
            )
            for rank, endpoint in enumerate(self.sockets.endpoints)
        ]

    # Looking in

    def debug(self) -> dict[str, Any]:
        """What is held by anybody or by nobody (reference §11.1)."""
        worker = self.worker
        seen: dict[str, Any] = {
            "mode": self.settings.mode,
            "profile": worker.profile.version,
            "status_rule": worker.profile.status_rule,
            "outstanding": worker.outstanding(),
            "counters": [dict(worker.counters(rank)) for rank in range(self.disagg.tp_size)],
            "malformed_messages": self.transport.malformed,
            "queue_gauges": dict(worker.queue_gauges()),
        }
        if isinstance(worker, PrefillWorker):
            seen["transfer_workers"] = [self._workers(rank) for rank in range(self.disagg.tp_size)]
        if self.kv_agents:
            seen["real_bytes"] = [agent.counters() for agent in self.kv_agents]
        return seen

    def _workers(self, rank: int) -> list[dict[str, Any]]:
        assert isinstance(self.worker, PrefillWorker)
        return [
            {"room": one.chunk.room if one.chunk else None, "action": one.action.value, "queued": len(one.queue)}
            for one in self.worker.ranks[rank].workers
        ]


def _page_move(handle: int, agent: str, write: Write) -> Move:
    """A room's pages are its own for as long as their stamp is. All prefill ranks write the same bytes into a page."""
    chunk = write.chunk
    return Move(handle, agent, "WRITE", f"{chunk.room}:{chunk.stamp}", (), chunk.pages, tuple(encode(chunk)))


def _nothing() -> None:
    """What a driver calls when there is no transport."""
