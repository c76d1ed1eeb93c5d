"""A worker that answers as it is told and remembers what it got, behind a real socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from tests.serve.live import PATIENCE_S

from windtunnel.serve.asgi import read_body, send_bytes
from windtunnel.serve.beside import Quiet
from windtunnel.serve.router import proxy
from windtunnel.serve.router.app import RouterApp
from windtunnel.serve.router.config import RouterConfig
from windtunnel.serve.router.server import uvicorn_config


class FakeWorker:
    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw_headers: list[list[tuple[bytes, bytes]]] = []
        self.answer: dict[str, Any] | None = None
        """Instead of where the request came to."""
        self.frames: tuple[bytes, ...] = (*(b"data: %d\n\n" % number for number in range(3)), b"data: [DONE]\n\n")
        self.failures: list[int] = []
        """Statuses of the next answers."""
        self.stays_after_first = False
        """A stream waits for its client's leaving after its first frame."""
        self.cut = 0
        """Streams whose client left after the first frame."""
        self.gone = 0
        self.go = asyncio.Event()
        """Answers wait for it."""
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = await read_body(receive, 1 << 20, PATIENCE_S)
        body = json.loads(raw) if raw else {}
        self.bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.raw_headers.append(scope["headers"])
        if not await self._may_go(receive):
            self.gone += 1
            return
        if body.get("stream"):
            await self._stream(receive, send)
        else:
            told = self.answer or {"from": self.url, "path": scope["path"]}
            status = self.failures.pop(0) if self.failures else self.status
            await send_bytes(send, status, json.dumps(told).encode())

    async def _may_go(self, receive: Any) -> bool:
        """False: the client has left first."""
        going, leaving = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(receive())
        await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        leaving.cancel()
        return self.go.is_set()

    async def _stream(self, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        for frame in self.frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            if self.stays_after_first:
                await receive()
                self.cut += 1
                return
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The base URL of an ASGI application behind a free port."""
    config = app if isinstance(app, uvicorn.Config) else uvicorn.Config(app, port=0, lifespan="off", log_config=None)
    server = Quiet(config)
    task = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(PATIENCE_S):
        while not server.started:
            await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextlib.asynccontextmanager
async def workers(*statuses: int) -> AsyncIterator[list[FakeWorker]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [FakeWorker(status) for status in statuses]
        for worker in made:
            worker.url = await stack.enter_async_context(serving(worker))
        yield made


@contextlib.asynccontextmanager
async def router(**fields: Any) -> AsyncIterator[str]:
    config = RouterConfig(port=0, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proxy, "CONNECT_S", PATIENCE_S
        )  # a machine that stands still for its five seconds is no worker that is gone
        app = RouterApp(config)
    async with serving(uvicorn_config(config, app)) as url:
        yield url
    await app.close()
