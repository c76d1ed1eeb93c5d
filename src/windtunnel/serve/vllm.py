"""vLLM's side of the seam in `serve.flavour`."""

import random
from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from windtunnel.core.pacing import Pacing
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.engine import VllmEngine
from windtunnel.serve import operations
from windtunnel.serve.asgi import Endpoint
from windtunnel.serve.config import ServeConfig
from windtunnel.serve.engines import engine_config, make_metrics
from windtunnel.serve.generate import GenerateRoute
from windtunnel.serve.middleware import ApiKeys, HttpMetrics
from windtunnel.serve.operations.endpoint import Row
from windtunnel.serve.planning import PrefixReader
from windtunnel.serve.ranks import Balancer, Placer
from windtunnel.serve.responses import ResponsesRoute
from windtunnel.serve.state import Server
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Family
from windtunnel.wire.kv_events import EventCodec
from windtunnel.wire.vllm import families, responses
from windtunnel.wire.vllm.metrics import VllmMetrics


class VllmFlavour:
    def engine_config(self, config: ServeConfig, tokenizer: Tokenizer) -> VllmEngineConfig:
        return engine_config(config, tokenizer)

    async def start(self, server: Server) -> None:
        """A server without peers."""

    async def stop(self) -> None:
        """Nothing was started."""

    def refused(self, server: Server, family: str, kv_transfer: object) -> None:
        """Nobody waits for it elsewhere."""

    def engine(self, config: VllmEngineConfig, pacing: Pacing, chance: random.Random) -> VllmEngine:
        return VllmEngine(config, pacing)

    def placer(self, engines: Sequence[VllmEngine]) -> Placer:
        return Balancer(len(engines))

    def dead(self, engine: VllmEngine) -> bool:
        return engine.control.death is not None

    def prefix_reader(self, engine: VllmEngine) -> PrefixReader:
        return PrefixReader(engine.hasher, engine.foresee)

    def metrics(self, config: ServeConfig, engine_config: VllmEngineConfig) -> VllmMetrics:
        return make_metrics(config, engine_config)

    def kv_codec(self, config: ServeConfig) -> EventCodec:
        return EventCodec(config.kv_events.form, config.kv_events.hashes)

    def env(self, env: ServerEnv, config: ServeConfig) -> ServerEnv:
        return env

    def families(self, config: ServeConfig) -> Sequence[Family]:
        return families(config.runner, config.convert, config.num_labels)

    def route(self, server: Server, family: Family) -> Endpoint:
        return (ResponsesRoute if family.name == responses.name else GenerateRoute)(server, family)

    def rows(self, server: Server) -> list[Row]:
        return operations.table(server)

    def middleware(self, server: Server, app: Any) -> Any:
        config = server.config
        app = HttpMetrics(app, metrics=server.metrics)
        app = CORSMiddleware(app, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        return ApiKeys(app, keys=config.api_keys) if config.api_keys else app
