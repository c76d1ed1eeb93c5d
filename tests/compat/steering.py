"""Setups of their own and their probes: balance by ranks, by cache, by load; workers that give vectors."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import httpx

from tests.compat.cases import WORKS
from tests.compat.modes import Mode, Setup
from tests.compat.shapes import CHAT, OF
from tests.compat.site import EMBEDDINGS, MODEL, Site, Worker

ASKED = 6
TRIES = 40
_FORMS: dict[str, dict[str, Any]] = {
    "a text": {"input": "storm"},
    "two texts": {"input": ["storm", "calm"]},
    "base64": {"input": "storm", "encoding_format": "base64"},
}
_TWO_RANKS = {"vllm": ("--data-parallel-size", "2"), "sglang": ("--dp-size", "2")}


def by_load(head: str, engine: str) -> Setup:
    """`head`: the router's command line before its policy and workers."""
    words = f"{head} --policy power_of_two --worker-urls {{url0}} {{url1}}"
    return Setup("`--policy power_of_two`", Mode("load", engine, words, balanced=False), answered, thorough=True)


def by_rank(head: str, engine: str, aware: str) -> Setup:
    """`aware`: what tells the router that its worker has two ranks."""
    words = f"{head} {aware} --policy round_robin --worker-urls {{url0}}"
    mode = Mode("ranks", engine, words, ("worker",), flags=_TWO_RANKS[engine])
    return Setup(f"`{aware}`, a worker with two ranks", mode, ranks)


def by_vectors(mode: Mode) -> Setup:
    """`mode`: the router before vLLM workers."""
    pooling = replace(mode, name="embeddings", flags=(*mode.flags, "--runner", "pooling"), pooling=True)
    return Setup(f"`{EMBEDDINGS}`, vLLM workers with `--runner pooling`", pooling, same_vectors)


async def same_vectors(site: Site) -> str:
    told = []
    for name, more in _FORMS.items():
        expected, answer = await site.both(EMBEDDINGS, {"model": MODEL} | more)
        if answer.status_code != 200:
            told.append(f"{name}: no: {answer.status_code}")
        elif _vectors(answer) != _vectors(expected):
            told.append(f"{name}: other vectors")
    return ", ".join(told) or WORKS


def _vectors(answer: httpx.Response) -> list[Any]:
    return [one["embedding"] for one in answer.json()["data"]]


async def answered(site: Site) -> str:
    told = sorted({(await site.post(CHAT, OF[CHAT].body)).status_code for _ in range(4)})
    return WORKS if told == [200] else f"no: {', '.join(map(str, told))}"


async def ranks(site: Site) -> str:
    """Where the rank is named, and which ranks are."""
    for _ in range(4):
        await site.post(CHAT, OF[CHAT].body)
    posts = site.workers[0].posts
    by_body = {one.body.get("data_parallel_rank") for one in posts}
    by_header = {one.headers.get("x-data-parallel-rank") for one in posts}
    for where, told in (("`data_parallel_rank`", by_body), ("`x-data-parallel-rank`", by_header)):
        if told - {None}:
            return f"{where} {' and '.join(sorted(map(str, told)))}"
    return "no rank is named"


def _conversation(name: str) -> dict[str, Any]:
    return OF[CHAT].body | {"messages": [{"role": "user", "content": f"conversation {name} " * 60}]}


async def follows_the_cache(site: Site) -> str:
    """Six of six go to the worker that holds the prompt, and to the other one once the blocks have moved."""
    first, second = site.workers
    await _hold(site, second, _conversation("a"))
    there = await _asked(site, _conversation("a"))
    await site.client.post(f"{second.live.url}/reset_prefix_cache")
    await _hold(site, second, _conversation("b"))
    await _hold(site, first, _conversation("a"))
    back = await _asked(site, _conversation("a"))
    return WORKS if (there, back) == ([0, ASKED], [ASKED, 0]) else f"{there}, then {back}"


async def _asked(site: Site, body: dict[str, Any]) -> list[int]:
    for worker in site.workers:
        worker.forget()
    for _ in range(ASKED):
        await site.post(CHAT, body)
    return [worker.asked for worker in site.workers]


async def _hold(site: Site, worker: Worker, body: dict[str, Any]) -> None:
    """The worker has the prompt in its cache, and the router has heard so: a later prompt there is a hit for it."""
    await site.client.post(f"{worker.live.url}{CHAT}", json=body)
    for number in range(TRIES):
        later = _conversation(f"barrier {worker.url} {body['messages'][0]['content'][:16]} {number}")
        await site.client.post(f"{worker.live.url}{CHAT}", json=later)
        before = await _hits(site)
        await site.post(CHAT, later)
        if await _hits(site) > before:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("no event of a worker has reached the router")


async def _hits(site: Site) -> float:
    text = (await site.client.get(site.metrics_url)).text
    found = re.search(r'^vllm_router_kv_placement_lookups_total\{result="hit"\} (\S+)', text, re.MULTILINE)
    return float(found[1]) if found else 0


async def goes_back_to_its_cache(site: Site) -> str:
    """Of four conversations with three turns each most blocks are found again."""
    for name in "abcd":
        for _ in range(3):
            await site.post(CHAT, _conversation(name))
    hits, queries = (
        sum(worker.live.gauge(f"vllm:prefix_cache_{what}_total") for worker in site.workers) for what in ("hits", "queries")
    )
    subscribed = sum(len(worker.live.server.publishers) for worker in site.workers)
    return WORKS if hits > queries / 2 and subscribed else f"{hits:.0f} of {queries:.0f} tokens found"
