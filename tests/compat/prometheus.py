"""Prometheus (clients reference §9): what it stores of a worker's page is compared with what the worker did."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.compat.cases import WORKS
from tests.compat.modes import Mode, Peer, Trial
from tests.compat.shapes import CHAT, OF
from tests.compat.site import ANSWER_S, START_S, Worker, running, worker
from tests.own_time import own_time
from tests.serve.live import RawClient, request_bytes
from windtunnel.ports import free_port

TTFT_S = 1.2
"""Inside a bucket of both engines."""
REQUESTS, STREAMS, SCRAPES = 6, 2, 3
ASK_S = 0.2
OWN_SERIES = 5
"""`up` and four `scrape_…` series are Prometheus's own, about each target."""
STYLE_EXIT = 3
"""Of `promtool check metrics`: nothing but lints."""
COLON_LINT = "metric names should not contain ':'"

COUNTER = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"}
HISTOGRAM = {"vllm": "vllm:time_to_first_token_seconds", "sglang": "sglang:time_to_first_token_seconds"}
GAUGE = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}

_WORDS = "--config.file={config} --storage.tsdb.path={folder}/data --web.listen-address=127.0.0.1:{port} --log.level=error"
_CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - {{job_name: worker, static_configs: [{{targets: ["{at0}"]}}]}}
"""
_TOLD = ("--ttft", f"{TTFT_S * 1000:.0f}ms", "--itl", "100ms")
_NIXL = ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}', "--nixl-side-channel-port", "0")


def _mode(name: str, engine: str, *flags: str) -> Mode:
    return Mode(name, engine, _WORDS, ("worker",), flags=(*_TOLD, *flags), config=_CONFIG)


@dataclass
class Scraped:
    """A worker, its page, and the Prometheus that scrapes it."""

    mode: Mode
    url: str
    """Of Prometheus."""
    worker: Worker
    client: httpx.AsyncClient
    promtool: Path

    async def page(self) -> str:
        return (await self.client.get(f"{self.worker.live.url}/metrics")).text

    async def ask(self, query: str) -> dict[str, float]:
        """Value by `le`, which is empty where a series has none."""
        answer = await self.client.get(f"{self.url}/api/v1/query", params={"query": query})
        return {one["metric"].get("le", ""): float(one["value"][1]) for one in answer.json()["data"]["result"]}

    async def until(self, query: str, wanted: Callable[[float], bool]) -> float:
        """What the query gives as soon as that is wanted, or at last."""
        told = 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not wanted(told := (await self.ask(query)).get("", 0.0)):
                    await asyncio.sleep(ASK_S)
        return told


# Rows


async def _scrapes(site: Scraped) -> str:
    """Those that failed are of one moment: between two questions there may be another scrape."""
    good = await site.until("sum_over_time(up[5m])", lambda told: told >= SCRAPES)
    failed = (await site.ask("count_over_time(up[5m]) - sum_over_time(up[5m])"))[""]
    return WORKS if good >= SCRAPES and not failed else f"{good:.0f}, and {failed:.0f} failed"


async def _counter(site: Scraped) -> str:
    body = OF[CHAT].body | {"ignore_eos": True}
    posts = [site.client.post(f"{site.worker.live.url}{CHAT}", json=body) for _ in range(REQUESTS)]
    tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in await asyncio.gather(*posts))
    told = await site.until(f"sum({COUNTER[site.mode.engine]})", lambda told: told >= tokens)
    return WORKS if told == tokens else f"{told:.0f} of {tokens}"


async def _quantile(site: Scraped) -> str:
    buckets = f"sum by (le) ({HISTOGRAM[site.mode.engine]}_bucket)"
    bounds = sorted(float(le) for le in await site.ask(buckets))
    above = min(bound for bound in bounds if bound >= TTFT_S)
    below = max(bound for bound in bounds if bound < TTFT_S)
    told = (await site.ask(f"histogram_quantile(0.5, {buckets})")).get("", 0.0)
    return WORKS if below < told <= above else f"{told:g} s"


async def _gauge(site: Scraped) -> str:
    name = f"sum({GAUGE[site.mode.engine]})"
    long = request_bytes(CHAT, OF[CHAT].body | {"max_tokens": 1000, "ignore_eos": True, "stream": True})
    clients = [await RawClient.connect(site.worker.live.port) for _ in range(STREAMS)]
    for client in clients:
        client.send(long)
    held = await site.until(name, lambda told: told == STREAMS)
    for client in clients:
        client.leave("fin")
    left = await site.until(name, lambda told: told == 0)
    return WORKS if (held, left) == (STREAMS, 0) else f"{held:.0f}, then {left:.0f}"


async def _series(site: Scraped) -> str:
    """Asked for together with the page, when nothing changes any more."""
    page = await site.page()
    wanted = len([line for line in page.splitlines() if not line.startswith("#")])
    told = await site.until('count({job="worker"})', lambda told: told == wanted + OWN_SERIES)
    return WORKS if told == wanted + OWN_SERIES else f"{told - OWN_SERIES:.0f} of {wanted}"


async def _types(site: Scraped) -> str:
    """Prometheus names the counters of this format with `_total`; the client's parser does not."""
    families = text_string_to_metric_families(await site.page())
    wanted = {(one.name + "_total" * (one.type == "counter"), one.type) for one in families}
    answer = await site.client.get(f"{site.url}/api/v1/targets/metadata")
    told = {(one["metric"], one["type"]) for one in answer.json()["data"]}
    return WORKS if told == wanted else ", ".join(sorted(f"`{name}` {kind}" for name, kind in told ^ wanted))


async def checked(promtool: Path, page: str) -> tuple[int, list[str]]:
    """The exit code of `promtool check metrics`, and its lines but for those about the colon."""
    words, pipe = (str(promtool), "check", "metrics"), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stderr=pipe)
    async with asyncio.timeout(ANSWER_S):
        _, told = await process.communicate(page.encode())
    return process.returncode or 0, [line for line in told.decode().splitlines() if not line.endswith(COLON_LINT)]


async def _well_formed(site: Scraped) -> str:
    code, lines = await checked(site.promtool, await site.page())
    return WORKS if code in (0, STYLE_EXIT) else "; ".join(lines)


async def _style(site: Scraped) -> str:
    _, lines = await checked(site.promtool, await site.page())
    return style(lines)


def style(lines: Sequence[str]) -> str:
    """A line is a metric's name and what is said of it."""
    return "; ".join(f"`{name}`: {said}" for name, _, said in (line.partition(" ") for line in lines)) or "nothing"


ROWS: dict[str, Callable[[Scraped], Awaitable[str]]] = {
    "three scrapes and more, none failed": _scrapes,
    "counter: every token that clients were given": _counter,
    f"`histogram_quantile(0.5, …)`: in the bucket of the server's {TTFT_S * 1000:.0f} ms to the first token": _quantile,
    f"gauge: {STREAMS} streams that run, and none once their clients have left": _gauge,
    "series stored: all that the page has": _series,
    "types: those of the page": _types,
    "`promtool check metrics`: no error of format": _well_formed,
    "what it says of style but for the colon in names": _style,
}


@dataclass(frozen=True)
class Scraping(Trial):
    rows: Sequence[str] = field(default=tuple(ROWS))

    async def run(self, mode: Mode, program: str) -> dict[str, str]:
        """The worker keeps this process's time: a busy machine does not put its first tokens into another bucket."""
        with own_time(asyncio.get_running_loop()):
            async with scraped(mode, program) as site:
                return {row: await probe(site) for row, probe in ROWS.items()}


@contextlib.asynccontextmanager
async def scraped(mode: Mode, program: str) -> AsyncIterator[Scraped]:
    """Raises TimeoutError when Prometheus does not come up."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await stack.enter_async_context(worker(mode, "worker", mode.plain_flags))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=ANSWER_S))
        places = {"port": free_port(), "folder": folder, "at0": server.live.url.removeprefix("http://")}
        await stack.enter_async_context(running(mode, program, places, folder))
        made = Scraped(mode, f"http://127.0.0.1:{places['port']}", server, client, Path(program).with_name("promtool"))
        async with asyncio.timeout(START_S):
            while not await _ready(made):
                await asyncio.sleep(ASK_S)
        yield made


async def _ready(made: Scraped) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await made.client.get(f"{made.url}/-/ready")).status_code == 200
    return False


PEER = Peer(
    "prometheus",
    "",
    "prometheus",
    (_mode("vLLM", "vllm"), _mode("vLLM, NIXL", "vllm", *_NIXL), _mode("SGLang", "sglang")),
    trial=Scraping(),
)
