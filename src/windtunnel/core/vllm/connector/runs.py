"""The engine with a KV connector for virtual time, whose tokens leave in runs (`core.vllm.runs`)."""

from windtunnel.core.pacing import Pacing
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.scheduler import ConnectorCompletion, ConnectorScheduler
from windtunnel.core.vllm.runs import RunCompletion, RunScheduler, RunVllmEngine


class RunConnectorScheduler(ConnectorScheduler, RunScheduler):
    """Loads, and sleepers."""


class RunConnectorCompletion(ConnectorCompletion, RunCompletion):
    """Holds, and runs."""


class RunConnectorEngine(ConnectorEngine, RunVllmEngine):
    """Says the same as `ConnectorEngine`; see `RunVllmEngine` for what it refuses."""

    scheduler_type = RunConnectorScheduler
    completion_type = RunConnectorCompletion
    _scheduler: RunConnectorScheduler

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, kv: KvTransferConfig, *, quick_hashes: bool = False) -> None:
        super().__init__(config, pacing, kv, quick_hashes=quick_hashes)
