"""A small HTTP server beside the main one, in the same event loop: a bootstrap server."""

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import uvicorn

from windtunnel.serve.asgi import Endpoint


class Beside:
    """Owns its sockets. `start` it once, and `close` it in the end."""

    def __init__(self, app: Endpoint, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        self.host = host
        self.port = port
        self._server = Quiet(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                access_log=False,
                log_config=None,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Raises OSError."""
        self._serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            if self._serving.done():
                raise OSError(f"the bootstrap port {self.port} cannot be opened on {self.host}")
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving


class Quiet(uvicorn.Server):
    """Signals are not its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            self.should_exit = True
