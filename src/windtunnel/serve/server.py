"""The process: event loop, listening socket, signals, and what clients see when it stops."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from windtunnel.core.vllm.control import DEATH
from windtunnel.serve.app import build
from windtunnel.serve.config import ServeConfig, UsageError, non_default
from windtunnel.serve.http11 import HttpLimits, protocol_class
from windtunnel.serve.shared_port import shared
from windtunnel.serve.signals import handled_by
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError

if TYPE_CHECKING:
    from windtunnel.serve.grpc_front import GrpcFront

log = logging.getLogger("windtunnel.serve")

_LAST_WRITES_S = 5
"""After the drain: how long connections have to take their last bytes."""
_FOR_EVER_NS = 1 << 62
GC_THRESHOLDS = (50_000, 25, 25)


class SimulatorProcess(uvicorn.Server):
    """uvicorn's server, with vLLM's two ways of stopping (§3.9) in front of its own.

    Without `--shutdown-timeout` requests at work end with an error (500, or an error frame). With it they run to their end,
    the socket stays open meanwhile, and new completions get an empty answer with `finish_reason: "abort"`. What happens to
    those that are left is `--shutdown-outcome`: `error`, `clean` (they end with `abort`) or `hang` (nothing, for as long as
    they wait). A second signal stops at once.
    """

    def __init__(self, config: uvicorn.Config, simulator: Server) -> None:
        super().__init__(config)
        self._simulator = simulator
        self.grpc: GrpcFront | None = None
        """Stops before HTTP does: its calls have their own grace."""
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn would end the process with 3, which here means something else. Raises UsageError."""
        try:
            await super().startup(sockets)
        except SystemExit:
            raise UsageError(f"--port {self.config.port}: cannot listen on {self.config.host}:{self.config.port}") from None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._simulator.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping is not None:
            self.should_exit = self.force_exit = True
        else:
            self._stopping = self._simulator.loop.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        jobs, config = self._simulator.jobs, self._simulator.config
        log.info("stopping: %d requests at work", len(jobs))
        if self.grpc is not None:
            await self.grpc.stop()
        if config.shutdown_timeout_ns:
            jobs.draining = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(jobs.idle(), config.shutdown_timeout_ns / 1e9)
        if config.shutdown_outcome == "hang":
            await self._hang()
        elif config.shutdown_outcome == "clean":
            jobs.abort_all()
        else:
            jobs.fail_all(WireError(DEATH, 500, "InternalServerError"))
        self.should_exit = True

    async def _hang(self) -> None:
        """The engine has gone without a word: the port is closed and clients at work wait until they give up (vLLM #24885)."""
        for server in self.servers:
            server.close()
        for engine in self._simulator.engines:
            engine.freeze(_FOR_EVER_NS)
        await self._simulator.jobs.idle()

    async def watch(self) -> None:
        """vLLM's watchdog: looks every few seconds whether the engine has died, and then ends the server (§3.9)."""
        config = self._simulator.config
        while not self.should_exit:
            await asyncio.sleep(config.watchdog_ns / 1e9)
            if self._simulator.dead and not config.keep_alive_on_engine_death:
                log.error("the engine is dead: stopping")
                self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return handled_by(self.handle_exit)


def run(config: ServeConfig) -> None:
    """Serve until a signal. Blocks."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(serve(config))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def serve(config: ServeConfig) -> None:
    server = Server(config, asyncio.get_running_loop())
    process = SimulatorProcess(uvicorn_config(config, server), server)
    log.info("windtunnel %s: non-default args: %s", os.getpid(), json.dumps(non_default(config)))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    watchdog = asyncio.create_task(process.watch())
    try:
        process.grpc = await _grpc_front(server)
        await server.flavour.start(server)
        await process.serve()
    finally:
        watchdog.cancel()
        if process.grpc is not None:
            await process.grpc.stop(0)
        await server.flavour.stop()
        server.close()


async def _grpc_front(server: Server) -> "GrpcFront | None":
    if not server.config.grpc:
        return None
    from windtunnel.serve import grpc_front

    return await grpc_front.start(server)


def uvicorn_config(config: ServeConfig, server: Server) -> uvicorn.Config:
    limits = config.limits
    http_limits = HttpLimits(limits.head_bytes, limits.head_timeout_ns / 1e9, write_buffer_bytes=limits.write_buffer_bytes)
    http = protocol_class(http_limits)
    return uvicorn.Config(
        build(server),
        host=config.host,
        port=config.port,
        limit_concurrency=limits.connections + 1,
        http=http if server.grpc_relay is None else shared(http, server.grpc_relay),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        access_log=not config.disable_access_log,
        timeout_keep_alive=max(1, round(config.timeout_keep_alive_ns / 1e9)),
        timeout_graceful_shutdown=_LAST_WRITES_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
