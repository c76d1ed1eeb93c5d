"""A live server inside the test's own event loop, so that a test can look at the engine while a real socket talks to it."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from windtunnel.serve.config import ServeConfig
from windtunnel.serve.flag_checks import check
from windtunnel.serve.flags import apply_values
from windtunnel.serve.server import SimulatorProcess, uvicorn_config
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError

PATIENCE_S = 60
"""No test waits longer for a state than this; reaching it is a failure, never a pass."""
FOREVER_NS = 3600 * 10**9


class LiveServer:
    def __init__(self, server: Server, process: SimulatorProcess) -> None:
        self.server = server
        self.process = process
        self.port: int = process.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0)

    def states(self) -> list[str]:
        return [view.state.value for view in self.server.engine.live()]

    def published(self) -> float:
        """Running and waiting requests as the gauges say: what the last step has delivered."""
        return self.gauge("vllm:num_requests_running") + self.gauge("vllm:num_requests_waiting")

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        from windtunnel.wire.metrics import render

        text = render(self.server.metrics.store).decode()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


@contextlib.asynccontextmanager
async def live(**values: Any) -> AsyncIterator[LiveServer]:
    """`values` are dotted targets of ServeConfig with `__` for the dot: `pacing__itl_ns=…`."""
    config = replace(ServeConfig(model="wt-model", port=0), disable_access_log=True)
    config = check(apply_values(config, {name.replace("__", "."): value for name, value in values.items()}))
    async with serving(config) as server:
        yield server


@contextlib.asynccontextmanager
async def serving(config: ServeConfig) -> AsyncIterator[LiveServer]:
    server = Server(config, asyncio.get_running_loop())
    process = SimulatorProcess(uvicorn_config(config, server), server)
    process.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    try:
        await server.flavour.start(server)
        task = asyncio.create_task(process.serve())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not process.started:
                    await asyncio.sleep(0)
            yield LiveServer(server, process)
        finally:
            server.jobs.fail_all(WireError("the test is over", 500))
            process.should_exit = process.force_exit = True
            await task
    finally:
        await server.flavour.stop()
        server.close()


def request_bytes(path: str, body: dict[str, Any] | bytes, *, extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
    return head.encode() + data


class RawClient:
    """One TCP connection with control over how it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> "RawClient":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(mark)

    async def read_all(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    def leave(self, mechanism: str) -> None:
        """`fin`, `rst` or `half_close`."""
        if mechanism == "half_close":
            self.writer.write_eof()
            return
        if mechanism == "rst":
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
            return
        self.writer.close()
