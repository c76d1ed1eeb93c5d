"""A vLLM server with a KV connector: the engines are made with their sockets, and connected at the start."""

import logging
import random

from windtunnel.core.pacing import Pacing
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.operations.endpoint import Call, Reply, Row, Simple, get, json_reply
from windtunnel.serve.seams import Seams
from windtunnel.serve.state import Server
from windtunnel.serve.vllm import VllmFlavour
from windtunnel.serve.vllm_pd.connection import Connection, NixlConnection, Rank
from windtunnel.serve.vllm_pd.mooncake import MooncakeConnection

log = logging.getLogger("windtunnel.serve")

_NOT_COVERED = frozenset({"generate"})
"""Families whose refusals tell nobody (reference §7.2)."""


class KvTransferFlavour(VllmFlavour):
    """One server with a KV connector. Owns its connections."""

    def __init__(self, config: ServeConfig, seams: Seams) -> None:
        self._config = config
        self._seams = seams
        self._connections: list[Connection] = []

    def engine(self, config: VllmEngineConfig, pacing: Pacing, chance: random.Random) -> ConnectorEngine:
        """Binds the rank's sockets. Raises UsageError."""
        rank = Rank(self._config, config, pacing, chance, len(self._connections), self._seams)
        try:
            one = self._connection(rank)
        except (ValueError, OSError, MemoryError) as error:
            raise UsageError(f"--kv-transfer-config: {error}") from error
        if ignored := self._config.kv_transfer.parsed("-").ignored:
            log.warning("--kv-transfer-config: %s mean nothing here", ", ".join(ignored))
        self._connections.append(one)
        return one.engine

    def _connection(self, rank: Rank) -> Connection:
        if not self._config.kv_transfer.parsed("-").config.mooncake:
            return NixlConnection(rank)
        first = self._connections[0] if self._connections else None
        assert first is None or isinstance(first, MooncakeConnection), "connectors of two kinds in one server"
        return MooncakeConnection(rank, first)

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
