"""The seam between the one server and the two it simulates: what of it is vLLM's and what is SGLang's.

Everything else in `serve` (connections, driver, jobs, answers) is the same for both.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from windtunnel.core.pacing import Pacing
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.serve.asgi import Endpoint
from windtunnel.serve.config import ServeConfig
from windtunnel.serve.planning import PrefixReader
from windtunnel.serve.ranks import Placer
from windtunnel.serve.seams import Seams
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Family
from windtunnel.wire.kv_events import Codec

if TYPE_CHECKING:
    from windtunnel.serve.operations.endpoint import Row
    from windtunnel.serve.state import Server


class Flavour(Protocol):
    """Without state, but for a P/D worker's connections.

    Engines and metrics are of the flavour's own classes: only its own routes know more of them than `core.engine.Engine` (with
    `reconfigure`, `freeze`, `kill`) and `serve.telemetry.Metrics` (with a `store`) say.
    """

    def engine_config(self, config: ServeConfig, tokenizer: Tokenizer) -> Any:
        """What each rank's engine is told."""
        ...

    async def start(self, server: "Server") -> None:
        """Before the first request: what a worker with peers needs (P/D sockets, bootstrap server). Raises OSError."""
        ...

    async def stop(self) -> None:
        """After the last one."""
        ...

    def engine(self, config: Any, pacing: Pacing, chance: random.Random) -> Any:
        """The engine of one rank. `config` comes from `engine_config`."""
        ...

    def placer(self, engines: Sequence[Any]) -> Placer:
        """How requests are spread over the data-parallel ranks."""
        ...

    def dead(self, engine: Any) -> bool: ...

    def prefix_reader(self, engine: Any) -> PrefixReader | None:
        """What hashes and matches the blocks of a long prompt beforehand, where the engine takes that."""
        ...

    def metrics(self, config: ServeConfig, engine_config: Any) -> Any: ...

    def kv_codec(self, config: ServeConfig) -> Codec:
        """How KV events look on the wire."""
        ...

    def env(self, env: ServerEnv, config: ServeConfig) -> ServerEnv:
        """What the flavour's families know besides the common part."""
        ...

    def families(self, config: ServeConfig) -> Sequence[Family]: ...

    def route(self, server: "Server", family: Family) -> Endpoint:
        """The endpoint of a generating family."""
        ...

    def rows(self, server: "Server") -> "list[Row]":
        """The routes that generate nothing, and further methods of those that do."""
        ...

    def refused(self, server: "Server", family: str, kv_transfer: object) -> None:
        """The front end has refused a request with these `kv_transfer_params` before its engine knew of it."""
        ...

    def middleware(self, server: "Server", app: Any) -> Any:
        """What stands directly around the routes: HTTP metrics and API keys."""
        ...


def flavour_of(config: ServeConfig, seams: Seams) -> Flavour:
    if config.engine == "sglang" and config.disagg.on:
        from windtunnel.serve.sglang.disagg_flavour import DisaggFlavour

        return DisaggFlavour(config, seams)
    if config.engine == "sglang":
        from windtunnel.serve.sglang.flavour import SglangFlavour

        return SglangFlavour()
    if config.kv_transfer.on:
        from windtunnel.serve.vllm_pd.flavour import KvTransferFlavour

        return KvTransferFlavour(config, seams)
    from windtunnel.serve.vllm import VllmFlavour

    return VllmFlavour()
