"""A router process between a client and simulated workers that live in this event loop, where a probe can look at them."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.compat.modes import Mode
from tests.serve.live import LiveServer, serving
from windtunnel.ports import free_port
from windtunnel.serve import failures, grpc_front
from windtunnel.serve.flags import parse_args
from windtunnel.serve.http11 import LINE, ClientLine
from windtunnel.serve.up.routers import Worker as ToldWorker
from windtunnel.serve.up.routers import registration

START_S = 120
ANSWER_S = 60
FREE_S = 1.5
"""A worker that still works for a client that left so long ago is not freed by its leaving, if there were turns to do it in."""
TURNS = 100
"""So often the router has answered something else meanwhile: whoever is short of the processor is not thought to be deaf."""
POLL_S = 0.005
MODEL = "wt-model"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True)
class Heard:
    """One request that reached a worker over HTTP. Header names are lower case."""

    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Worker:
    """One simulated server. `failing` is the status that it refuses generating requests with."""

    role: str
    live: LiveServer
    bootstrap_port: int
    grpc_port: int | None
    failing: int = 0
    asked: int = 0
    """Generating requests that reached it, over HTTP or gRPC."""
    heard: list[Heard] = field(default_factory=list)
    lines: list[ClientLine] = field(default_factory=list)
    visits: set[str] = field(default_factory=set)
    """Paths that were asked for over HTTP, such as that of its health."""

    @property
    def url(self) -> str:
        return self.live.url if self.grpc_port is None else f"grpc://127.0.0.1:{self.grpc_port}"

    @property
    def posts(self) -> list[Heard]:
        """Generating requests with JSON bodies."""
        return [one for one in self.heard if isinstance(one.body, dict) and one.path in GENERATING]

    def empty(self) -> bool:
        """Nothing runs, waits, or is held. A prefill keeps the room of a leg that never reached it, or stranded blocks."""
        outstanding = getattr(self.live.server.engine, "outstanding", dict)()
        kept = 2 * outstanding.get("stray_rooms", 0) + outstanding.get("stranded", 0)
        held = sum(outstanding.values()) - kept
        return not any((self.live.states(), len(self.live.server.jobs), held))

    def connected(self) -> bool:
        """Somebody waits for an answer over HTTP."""
        return any(not line.gone and not line.answered for line in self.lines)

    def told(self, **settings: Any) -> None:
        """Change live settings, such as `ttft`."""
        self.live.server.reconfigure(settings)

    def forget(self) -> None:
        self.failing = self.asked = 0
        self.heard.clear()
        self.lines.clear()

    def watch(self) -> None:
        """Count, record and refuse from here on."""
        inject, config = self.live.server.inject_failure, self.live.process.config
        app: Any = config.loaded_app

        def counted(asked: str | None) -> None:
            self.asked += 1
            if self.failing:
                failures.check_header(str(self.failing))
            inject(asked)

        async def recording(scope: Any, receive: Any, send: Any) -> None:
            data = bytearray()
            self.visits.add(scope["path"])
            if scope["path"] in GENERATING:
                self.lines.append(scope[LINE])

            async def tapped() -> Any:
                message = await receive()
                data.extend(message.get("body", b""))
                if message["type"] == "http.request" and not message.get("more_body"):
                    self.heard.append(_heard(scope, bytes(data)))
                return message

            await app(scope, tapped, send)

        self.live.server.inject_failure = counted  # type: ignore[method-assign]
        config.loaded_app = recording


GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate")


def _heard(scope: Any, data: bytes) -> Heard:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    body = None
    with contextlib.suppress(ValueError):
        body = json.loads(data)
    return Heard(scope["path"], headers, body)


@dataclass
class Site:
    """A router that has taken its workers in, and `reference`: a worker of the same engine without a router."""

    mode: Mode
    url: str
    metrics_url: str
    """Of the router."""
    workers: Sequence[Worker]
    reference: LiveServer
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(f"{self.url}{path}", json=body, headers=headers)

    async def direct(self, path: str, body: Any) -> httpx.Response:
        """The same, asked of the worker itself."""
        return await self.client.post(f"{self.reference.url}{path}", json=body)

    async def both(self, path: str, body: Any) -> tuple[httpx.Response, httpx.Response]:
        """The worker's answer, and the router's."""
        return await asyncio.gather(self.direct(path, body), self.post(path, body))  # type: ignore[return-value]

    async def hello(self) -> httpx.Response:
        """The smallest request that its workers answer."""
        path, body = (EMBEDDINGS, {"model": MODEL, "input": "hi"}) if self.mode.pooling else ("/v1/chat/completions", HELLO)
        return await self.post(path, body)

    def busy(self) -> list[str]:
        """Roles of workers that are not empty."""
        return [worker.role for worker in self.workers if not worker.empty()]

    async def until(self, condition: Callable[[], Any], patience_s: float | None = None) -> bool:
        patience_s = ANSWER_S * self.mode.patience if patience_s is None else patience_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not condition():
                    await asyncio.sleep(POLL_S)
        return bool(condition())

    async def in_time(self, condition: Callable[[], Any]) -> bool:
        """Whether the condition has come to hold within `FREE_S` and `TURNS`."""
        loop = asyncio.get_running_loop()
        end_s, turns = loop.time() + FREE_S, 0
        while not condition() and (loop.time() < end_s or turns < TURNS):
            with contextlib.suppress(httpx.TransportError):
                await self.client.get(f"{self.url}/v1/models")
            turns += 1
            await asyncio.sleep(POLL_S)
        return bool(condition())

    def _emptied(self) -> bool:
        """A router may send a leg when its client has gone and the other leg has been ended: that one is ended, too."""
        for worker in self.workers:
            worker.live.server.jobs.abort_all()
        return not self.busy()

    def _held(self) -> list[str]:
        """What a busy worker has, and in which state."""
        return [
            f"{one.role}: {view.state.value}" for one in self.workers for view in one.live.server.engine.live()
        ] or self.busy()

    async def settle(self) -> None:
        """Back to workers that are idle, willing and forgetful."""
        for worker in self.workers:
            worker.forget()
        assert await self.until(self._emptied), f"not empty: {self._held()}"
        while self.mode.random and not all(worker.asked for worker in self.workers):
            await self.hello()
        for worker in self.workers:
            worker.forget()
            worker.live.server.engine.check_integrity()


@contextlib.asynccontextmanager
async def site(mode: Mode, program: str) -> AsyncIterator[Site]:
    """Raises TimeoutError when the router does not come up, RuntimeError when it ends instead."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(mode, role, mode.serve_flags)) for role in mode.roles]
        reference = await stack.enter_async_context(serving(parse_args(mode.serve_flags("worker", free_port(), 0)).config))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=ANSWER_S * mode.patience))
        port, metrics_port = free_port(), free_port()
        places = _places(workers) | {"port": port, "metrics_port": metrics_port}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = await stack.enter_async_context(running(mode, program, places, folder))
        urls = [f"http://127.0.0.1:{one}" for one in (port, metrics_port)]
        made = Site(mode, urls[0], f"{urls[1]}/metrics", workers, reference, client)
        async with asyncio.timeout(START_S * mode.patience):
            await _ready(made, process)
        yield made


@contextlib.asynccontextmanager
async def worker(mode: Mode, role: str, flags: Callable[[str, int, int], list[str]]) -> AsyncIterator[Worker]:
    bootstrap = free_port()
    async with serving(parse_args(flags(role, free_port(), bootstrap)).config) as live:
        front = await grpc_front.start(live.server) if mode.grpc else None
        try:
            made = Worker(role, live, bootstrap, front.port if front else None)
            made.watch()
            yield made
        finally:
            if front is not None:
                await front.stop(0)


def _places(workers: Sequence[Worker]) -> dict[str, Any]:
    places: dict[str, Any] = {}
    for number, worker in enumerate(workers):
        places |= {f"url{number}": worker.url, f"bootstrap{number}": worker.bootstrap_port}
        for source in worker.live.server.kv_event_sources.values():
            places[f"events{number}"] = f"tcp://127.0.0.1:{source['endpoint'].rsplit(':', 1)[1]}"
    return places


def command(mode: Mode, program: str, places: Mapping[str, Any], folder: Path) -> list[str]:
    """With its places filled in. The file that it may need is written to the folder."""
    if mode.config:
        (folder / "config.yaml").write_text(mode.config.format(**places))
    return [program, *mode.words.format(**places, config=folder / "config.yaml").split()]


@contextlib.asynccontextmanager
async def running(
    mode: Mode, program: str, places: Mapping[str, Any], folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The peer's process, which is ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *command(mode, program, places, folder),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | mode.environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(made: Site, process: asyncio.subprocess.Process) -> None:
    """Until it answers and has been at every worker."""
    joined = not made.mode.registers
    while process.returncode is None:
        with contextlib.suppress(httpx.TransportError):
            if not joined and (await made.client.get(f"{made.url}/health")).status_code < 600:
                await register(made.client, made.url, made.mode, [(one.url, one.bootstrap_port) for one in made.workers])
                joined = True
            answer = await made.hello()
            seen = all(worker.asked if made.mode.balanced else worker.visits or made.mode.grpc for worker in made.workers)
            if joined and seen and answer.status_code == 200:
                return await made.settle()
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the router ended with exit code {process.returncode} before it was up")


async def register(client: httpx.AsyncClient, router: str, mode: Mode, workers: Iterable[tuple[str, int]]) -> None:
    """Each worker's URL and bootstrap port, in the order of the mode's roles."""
    for role, (url, port) in zip(mode.roles, workers, strict=True):
        told = ToldWorker(url, role)  # type: ignore[arg-type]
        if mode.connector == "mooncake":
            told = replace(told, bootstrap_port=port if role == "prefill" else None, connector="MooncakeConnector")
        await client.post(f"{router}/workers", json=registration(told))


Probe = Callable[[Site], Awaitable[str]]
"""Does one thing at a site and says what came of it: `works`, or what else, in words that are the same in every run."""
