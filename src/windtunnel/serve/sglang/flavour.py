"""SGLang's side of the seam in `serve.flavour`: a unified worker."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from windtunnel.core.pacing import Pacing
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.engine import SglangEngine
from windtunnel.core.sglang.loop import SglangLoop
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.serve.asgi import Endpoint
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import ServeConfig
from windtunnel.serve.operations.endpoint import Row
from windtunnel.serve.ranks import Balancer, Placer
from windtunnel.serve.sglang import operations
from windtunnel.serve.sglang.batch_log import BatchLog
from windtunnel.serve.sglang.engines import sglang_engine_config
from windtunnel.serve.sglang.generate import SglangRoute
from windtunnel.serve.sglang.middleware import SglangHttp, SglangKeys
from windtunnel.serve.sglang.sessions import Sessions
from windtunnel.serve.state import Server
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Family
from windtunnel.wire.sglang import families
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.sglang.kv_events import SglangEventCodec
from windtunnel.wire.sglang.metrics import SglangMetrics


class SglangFlavour:
    """`DisaggFlavour` is a P/D worker."""

    engine_type = "unified"
    renamed: Mapping[str, str] = MappingProxyType({})
    """Gauges that have an older name in the imitated release."""

    def __init__(self) -> None:
        self.sessions = Sessions(now_ns)

    def engine_config(self, config: ServeConfig, tokenizer: Tokenizer) -> SglangEngineConfig:
        return sglang_engine_config(config, tokenizer)

    async def start(self, server: Server) -> None:
        """A server without peers."""
        log_batches(server)

    async def stop(self) -> None:
        """Nothing was started."""

    def refused(self, server: Server, family: str, kv_transfer: object) -> None:
        """Nobody waits for it elsewhere."""

    def engine(self, config: SglangEngineConfig, pacing: Pacing, chance: random.Random) -> SglangLoop:
        return SglangEngine(config, pacing, chance)

    def placer(self, engines: Sequence[SglangLoop]) -> Placer:
        return Balancer(len(engines))

    def dead(self, engine: SglangLoop) -> bool:
        return engine.dead is not None

    def prefix_reader(self, engine: SglangLoop) -> None:
        """The radix cache compares tokens."""

    def metrics(self, config: ServeConfig, engine_config: SglangEngineConfig) -> SglangMetrics:
        settings = config.sglang
        return SglangMetrics(
            config.names[0],
            config.data_parallel_size,
            time.time,
            engine_type=self.engine_type,
            tp_ranks=range(settings.tp_size) if settings.enable_metrics_for_all_schedulers else (0,),
            constants=constant_gauges(engine_config),
            renamed=self.renamed,
        )

    def kv_codec(self, config: ServeConfig) -> SglangEventCodec:
        release = profile(config.sglang.profile)
        return SglangEventCodec(release.kv_events_as_maps, release.kv_events_coalesced)

    def env(self, env: ServerEnv, config: ServeConfig) -> ServerEnv:
        """The same values, and those that SGLang's families need besides."""
        common = {item.name: getattr(env, item.name) for item in fields(ServerEnv)}
        settings = config.sglang
        return SglangEnv(
            **common,
            enable_cache_report=settings.enable_cache_report,
            incremental_output=settings.incremental_streaming_output,
            weight_version=settings.weight_version,
        )

    def families(self, config: ServeConfig) -> Sequence[Family]:
        return families()

    def route(self, server: Server, family: Family) -> Endpoint:
        return SglangRoute(server, family, self.sessions)

    def rows(self, server: Server) -> list[Row]:
        return operations.table(server, self.sessions)

    def middleware(self, server: Server, app: Any) -> Any:
        """CORS is open, as in SGLang."""
        config = server.config
        app = SglangHttp(app, server.metrics)
        if config.api_keys or config.sglang.admin_api_key is not None:
            app = SglangKeys(app, config.api_keys, config.sglang.admin_api_key, operations.ADMIN_PATHS)
        return CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], allow_credentials=True)


def log_batches(server: Server) -> None:
    if server.config.sglang.log_batches:
        server.driver.observe(BatchLog())


def constant_gauges(config: SglangEngineConfig) -> Mapping[str, float]:
    """Set once at start."""
    return {
        "max_total_num_tokens": config.capacity,
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "context_len": config.context_length,
    }
