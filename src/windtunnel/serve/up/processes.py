"""Starts a plan's processes, watches them, and ends them. Only processes that were started here are ever signalled."""

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from windtunnel.ports import HOST, free_port, free_ports
from windtunnel.serve.up.plan import Pairing, Ports, UpError, UpPlan
from windtunnel.serve.up.routers import PROGRAMS, Worker, registration

log = logging.getLogger("windtunnel.up")

READY_POLL_S = 0.05
READY_TIMEOUT_S = 120.0
TERM_PATIENCE_S = 5.0
_SCRAPE_S = 30.0


@dataclass(frozen=True, slots=True)
class Up:
    """What runs."""

    url: str
    """Where clients go: the router, or the only server."""
    servers: Mapping[str, str]
    """Name → base URL."""
    ports: Ports


def choose_ports(plan: UpPlan) -> Ports:
    free = iter(free_ports(2 * len(plan.servers)))
    ports = {server.name: server.port or next(free) for server in plan.servers}
    bootstrap = {server.name: server.bootstrap_port or next(free) for server in plan.servers if server.role == "prefill"}
    return Ports(ports, bootstrap)


class Fleet:
    """Owns the processes. `start`, then `watch`, and always `stop`."""

    def __init__(self, plan: UpPlan) -> None:
        self.plan = plan
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(trust_env=False, timeout=_SCRAPE_S)

    async def start(self) -> Up:
        """All servers side by side, then the router. Raises UpError when one of them does not come up."""
        plan = self.plan
        ports = choose_ports(plan)
        urls = {server.name: f"http://{HOST}:{ports.ports[server.name]}" for server in plan.servers}
        for server in plan.servers:
            words = [ports.fill(word, server.name) for word in server.args]
            await self._run(server.name, [sys.executable, "-m", "windtunnel", "serve", *words])
        await asyncio.gather(*(self._ready(name, f"{url}/v1/models") for name, url in urls.items()))
        if plan.router == "none":
            return Up(next(iter(urls.values())), urls, ports)
        port = plan.router_port or free_port()
        await self._run("router", [*router_command(plan, urls, ports, port), *plan.router_args])
        await self._joined(f"http://{HOST}:{port}", _workers(plan, urls, ports))
        return Up(f"http://{HOST}:{port}", urls, ports)

    async def _joined(self, url: str, workers: Sequence[Worker]) -> None:
        """Until the router has its workers; those that it does not take from its command line are told to it here."""
        if self.plan.router == "windtunnel" or not registers(self.plan):
            await self._ready("router", f"{url}/health")
        else:
            await self._ready("router", f"{url}/liveness")
            for worker in workers:
                await self._client.post(f"{url}/workers", json=registration(worker))
            await self._ready("router", f"{url}/workers", partial(_all_healthy, len(workers)))
        if self.plan.router != "windtunnel":
            await self._ready("router", f"{url}/v1/models")

    async def _run(self, name: str, words: Sequence[str]) -> None:
        log.info("%s: %s", name, " ".join(words))
        try:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr.fileno()
            )
        except OSError as error:
            raise UpError(f"{name}: cannot start {words[0]}: {error}") from error

    async def _ready(self, name: str, url: str, told: Callable[[httpx.Response], bool] = lambda answer: True) -> None:
        """Until it answers 200 and what is `told` holds. Raises UpError."""
        process = self._processes[name]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await self._answers(url, told):
                    if process.returncode is not None:
                        raise UpError(f"{name} exited with {process.returncode} before it was ready")
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            raise UpError(f"{name}: {url} was not ready within {READY_TIMEOUT_S:g} s") from None

    async def _answers(self, url: str, told: Callable[[httpx.Response], bool] = lambda answer: True) -> bool:
        try:
            answer = await self._client.get(url)
            return answer.status_code == 200 and told(answer)
        except httpx.HTTPError:
            return False

    async def watch(self, up: Up, stop: asyncio.Event, tell: Callable[[str], None]) -> bool:
        """Until `stop` is set (True), or a process ends by itself (False, and `tell` says which)."""
        waits = {name: asyncio.ensure_future(process.wait()) for name, process in self._processes.items()}
        stopped = asyncio.ensure_future(stop.wait())
        probes = asyncio.ensure_future(self._probe(up))
        try:
            await asyncio.wait([stopped, *waits.values()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            probes.cancel()
            for task in (stopped, *waits.values()):
                task.cancel()
        for name, process in self._processes.items():
            if process.returncode is not None and not stop.is_set():
                tell(f"{name} exited with {process.returncode}")
        return stop.is_set()

    async def _probe(self, up: Up) -> None:
        """Ask every server's /health now and then, as an orchestrator does. The answers are not acted upon."""
        while self.plan.liveness_s:
            await asyncio.sleep(self.plan.liveness_s)
            await asyncio.gather(*(self._answers(f"{url}/health") for url in up.servers.values()))

    async def stop(self) -> None:
        """SIGTERM to each, the router first, then SIGKILL to what is left."""
        for process in reversed(self._processes.values()):
            _signal(process, signal.SIGTERM)
        waits = [process.wait() for process in self._processes.values()]
        try:
            async with asyncio.timeout(TERM_PATIENCE_S):
                await asyncio.gather(*waits)
        except TimeoutError:
            for process in self._processes.values():
                _signal(process, signal.SIGKILL)
            await asyncio.gather(*(process.wait() for process in self._processes.values()))
        await self._client.aclose()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def router_command(plan: UpPlan, urls: Mapping[str, str], ports: Ports, port: int) -> list[str]:
    """The router's command line: ours, or a package's on PATH (reference clients §2). Raises UpError."""
    pairs = {name: program.pairs for name, program in PROGRAMS.items()} | {"windtunnel": _OWN_PAIRS}
    if plan.pd and plan.pairing not in pairs[plan.router]:
        able = ", ".join(sorted(name for name, one in pairs.items() if plan.pairing in one))
        raise UpError(f"router: {plan.router} does not pair {plan.pairing} workers; those that do: {able}")
    pair = pairs[plan.router].get(plan.pairing, ())
    if plan.router == "windtunnel":
        head = [sys.executable, "-m", "windtunnel", "router"]
    else:
        program = PROGRAMS[plan.router]
        metrics = str(free_port())
        head = [_found(plan.router), *program.launch, "--prometheus-host", HOST, "--prometheus-port", metrics]
    return [*head, "--host", HOST, "--port", str(port), *_targets(plan, pair, _workers(plan, urls, ports))]


_OWN_PAIRS: Mapping[Pairing, tuple[str, ...]] = {
    "sglang": ("--pd-disaggregation",),
    "vllm": ("--vllm-pd-disaggregation",),
    "vllm-mooncake": ("--vllm-pd-disaggregation", "--kv-connector", "mooncake"),
}


def _found(router: str) -> str:
    found = shutil.which(router)
    if found is None:
        raise UpError(f"router: {router} is not on PATH; pip install {router}, or use --router windtunnel")
    return found


def _workers(plan: UpPlan, urls: Mapping[str, str], ports: Ports) -> list[Worker]:
    bootstrap = ports.bootstrap if plan.bootstraps else {}
    connector = "MooncakeConnector" if plan.pairing == "vllm-mooncake" else "NixlConnector"
    return [Worker(urls[server.name], server.role, bootstrap.get(server.name), connector) for server in plan.servers]


def _all_healthy(count: int, answer: httpx.Response) -> bool:
    """smg's `GET /workers`."""
    return sum(bool(worker["is_healthy"]) for worker in answer.json()["workers"]) == count


def registers(plan: UpPlan) -> bool:
    """The router's command line names no workers."""
    return plan.pd and plan.router in PROGRAMS and plan.pairing in PROGRAMS[plan.router].registers


def _targets(plan: UpPlan, pair: Sequence[str], workers: Sequence[Worker]) -> list[str]:
    if not plan.pd:
        return ["--worker-urls", *(worker.url for worker in workers)]
    words = list(pair)
    for role in () if registers(plan) else ("prefill", "decode"):
        for worker in (worker for worker in workers if worker.role == role):
            words += [f"--{role}", worker.url, *([] if worker.bootstrap_port is None else [str(worker.bootstrap_port)])]
    return words
