"""What is tried at every router: one row of its page each. A cell is `works`, or what was found, without times or ids."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from tests.compat.modes import Mode
from tests.compat.shapes import CHAT, GENERATE, OF, SAME, SHAPES, Same, Shape, frames
from tests.compat.site import MODEL, Probe, Site
from tests.serve.live import RawClient, request_bytes

WORKS = "works"
HEAD_S = 1.0
"""vLLM's head comes at once, SGLang's with the first token."""
LONG = {"max_tokens": 20_000, "ignore_eos": True}
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"Authorization": "Bearer wt-key", "X-Request-ID": "wt-id-1", "traceparent": _TRACE, "x-session-id": "wt-session"}


@dataclass(frozen=True)
class Case:
    row: str
    probe: Probe
    where: Callable[[Mode], bool] = lambda mode: True
    last: bool = False
    """A worker is lost by it."""
    thorough: bool = False
    """Tried by `make compat` only, for the time it takes."""


def _chat(**more: Any) -> dict[str, Any]:
    return OF[CHAT].body | more


# Answers


async def plain(site: Site, shape: Shape, *, stream: bool) -> str:
    """The text and the end of an answer are those that the worker gives."""
    body = shape.body | {"stream": stream}
    expected, answer = await site.both(shape.path, body)
    if expected.status_code == 404:
        return "not a route of the worker"
    if answer.status_code != 200:
        return f"no: {answer.status_code}"
    if stream and shape.ends not in answer.text:
        return "no terminator"
    return WORKS if shape.text(answer.text) == shape.text(expected.text) else "another text"


async def same(site: Site, one: Same) -> str:
    body = OF[one.path].body | one.more
    expected, answer = await site.both(one.path, body)
    if answer.status_code != expected.status_code:
        return f"no: {answer.status_code}"
    try:
        found = one.pick(_parsed(answer))
    except (LookupError, TypeError, AttributeError, ValueError):
        return "left out"
    return WORKS if found == one.pick(_parsed(expected)) else "not the worker's"


def _parsed(answer: httpx.Response) -> Any:
    return frames(answer.text) if answer.text.startswith("data:") else json.loads(answer.text)


async def listed(site: Site) -> str:
    """The names in `/v1/models`."""
    answer = await site.client.get(f"{site.url}/v1/models")
    names = sorted({one["id"] for one in answer.json()["data"]}) if answer.status_code == 200 else []
    return WORKS if names == [MODEL] else ", ".join(f"`{name}`" for name in names) or f"no: {answer.status_code}"


# What reaches the worker


async def renamed(site: Site) -> str:
    """The name under which `max_tokens` arrives."""
    await site.post(CHAT, _chat(max_tokens=7))
    told = {name for worker in site.workers for one in worker.posts for name, value in one.body.items() if value == 7}
    return ", ".join(f"`{name}`" for name in sorted(told)) or "in neither body"


async def unknown_field(site: Site) -> str:
    await site.post(CHAT, _chat(foo_unknown=1))
    return "kept" if any("foo_unknown" in one.body for worker in site.workers for one in worker.posts) else "dropped"


async def model_of_generate(site: Site) -> str:
    if (await site.post(GENERATE, OF[GENERATE].body)).status_code != 200:
        return "no such route"
    told = [one.body.get("model", "absent") for worker in site.workers for one in worker.posts]
    return "`" + json.dumps(told[0]).strip('"') + "`"


async def forwarded(site: Site) -> str:
    await site.post(CHAT, _chat(), **HEADERS)
    heard = [one.headers for worker in site.workers for one in worker.heard if one.path == CHAT]
    if not heard:
        return "none"
    kept = [name for name, value in HEADERS.items() if all(headers.get(name.lower()) == value for headers in heard)]
    return ", ".join(kept) or "none"


async def request_id(site: Site) -> str:
    answer = await site.post(CHAT, _chat(), **{"X-Request-ID": "wt-id-1"})
    told = answer.headers.get("x-request-id")
    return {None: "none", "wt-id-1": "the client's"}.get(told, "its own")


async def bootstrap_triple(site: Site) -> str:
    await site.post(CHAT, _chat())
    names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    triples = {tuple(one.body.get(name) for name in names) for worker in site.workers for one in worker.posts}
    (told,) = triples
    right = told[:2] == ("127.0.0.1", site.workers[0].bootstrap_port) and isinstance(told[2], int)
    return "the same on both legs" if right else f"{told[:2]}"


async def read(site: Site) -> str:
    """The decode gets the KV of the prompt from the prefill."""
    decode = site.workers[1].live

    def tokens() -> float:
        return decode.gauge("vllm:external_prefix_cache_hits_total")

    before = tokens()
    await site.post(CHAT, _chat(messages=[{"role": "user", "content": "a prompt of many blocks " * 40}]))
    return WORKS if tokens() > before else "the decode computes the prompt itself"


# Errors


async def passed(site: Site, body: dict[str, Any]) -> str:
    """A refusal comes through with its status and its text."""
    expected, answer = await site.both(CHAT, body)
    if answer.status_code != expected.status_code:
        return f"{answer.status_code} for the worker's {expected.status_code}"
    if answer.status_code == 200:
        return "200, as from the worker"
    return WORKS if _message(expected) in answer.text.replace('\\"', '"') else f"{answer.status_code} with its own text"


def _message(answer: httpx.Response) -> str:
    told = answer.json()
    return str((told.get("error") or told)["message"])


async def failing(site: Site, status: int, workers: slice, *, stream: bool = False, requests: int = 1) -> str:
    """What the client sees while these workers refuse."""
    for worker in site.workers[workers]:
        worker.failing = status
    answers = [await site.post(CHAT, _chat(stream=stream)) for _ in range(requests)]
    while site.mode.random and not any(worker.asked for worker in site.workers[workers]):
        answers.append(await site.post(CHAT, _chat(stream=stream)))
    told = sorted({answer.status_code for answer in answers})
    attempts = sum(worker.asked for worker in site.workers[workers])
    if told == [200]:
        return "200" if any(worker.asked for worker in site.workers[workers]) else "200, never asked"
    return f"{', '.join(map(str, told))} after {attempts} attempt{'s' if attempts > 1 else ''}"


async def cut(site: Site) -> str:
    """The workers' connections break in the middle of a stream."""
    client = await _held(site, stream=True)
    await client.read_until(b"content")
    for worker in site.workers:
        for connection in list(worker.live.process.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
    rest = bytearray()
    reading = asyncio.ensure_future(_read_into(client, rest))
    ended = await site.in_time(reading.done)
    reading.cancel()
    parts = ["an error frame" if b'"error"' in rest else "", "`[DONE]`" if b"[DONE]" in rest else ""]
    end = "a clean end" if rest.endswith(b"0\r\n\r\n") else "a cut body" if ended else "never ends"
    return ", ".join(part for part in (*parts, end) if part)


async def _read_into(client: RawClient, rest: bytearray) -> None:
    """To the end of the body, or of the connection."""
    while not rest.endswith(b"\r\n0\r\n\r\n") and (data := await client.reader.read(65536)):
        rest += data


async def dead(site: Site) -> str:
    """The first worker's process has gone: its port is closed."""
    worker = site.workers[0]
    for server in worker.live.process.servers:
        server.close()
    for connection in list(worker.live.process.server_state.connections):
        connection.transport.abort()  # type: ignore[union-attr]
    told = {(await site.post(CHAT, _chat())).status_code for _ in range(4)}
    return ", ".join(map(str, sorted(told)))


# Leaving


async def _held(site: Site, *, stream: bool, state: str = "decode") -> RawClient:
    """A request that is in this state on a worker and will be for long."""
    client = await RawClient.connect(site.port)
    client.send(request_bytes(CHAT, _chat(**LONG, stream=stream)))
    assert await site.until(lambda: any(state in worker.live.states() for worker in site.workers)), f"never in {state}"
    return client


async def leaving(site: Site, *, stream: bool) -> str:
    client = await _held(site, stream=stream)
    if stream:
        await client.read_until(b"content")
    return await _left(site, client)


async def leaving_before_the_first_token(site: Site, *, stream: bool) -> str:
    """Who is asked is at the prompt: for ever, or 4 s where a forward pass cannot be stopped. Where the router passes a head on
    at once, the client has it before it leaves.
    """
    for worker in site.workers:
        worker.told(ttft="1000h" if site.mode.engine == "vllm" else "80s")
    try:
        client = await RawClient.connect(site.port)
        client.send(request_bytes(CHAT, _chat(**LONG, stream=stream)))
        assert await site.until(lambda: all(worker.live.states() or not site.mode.legs_at_once for worker in site.workers))
        assert await site.until(lambda: bool(site.busy()))
        if stream and site.mode.engine == "vllm":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), HEAD_S)
        return await (_closed if site.mode.legs_at_once else _left)(site, client)
    finally:
        for worker in site.workers:
            worker.live.server.jobs.abort_all()
            worker.told(ttft="0ms")


async def _left(site: Site, client: RawClient) -> str:
    client.leave("fin")
    if await site.in_time(lambda: not site.busy()):
        return "freed"
    return f"{' and '.join(sorted(set(site.busy())))} runs on"


async def _closed(site: Site, client: RawClient) -> str:
    """A forward pass cannot be stopped, so this looks at the connections of both legs."""
    client.leave("fin")

    def kept() -> list[str]:
        return [worker.role for worker in site.workers if worker.connected()]

    if await site.in_time(lambda: not kept()):
        return "both legs closed"
    return f"{' and '.join(kept())} kept open"


# Balance


async def turns(site: Site) -> str:
    for _ in range(4):
        await site.post(CHAT, _chat())
    return " and ".join(str(worker.asked) for worker in site.workers)


# The table


def _http(mode: Mode) -> bool:
    return not mode.grpc


def _regular(mode: Mode) -> bool:
    return not mode.pd


def _in_turns(mode: Mode) -> bool:
    return not (mode.pd or mode.random)


def _both(first: Callable[[Mode], bool], second: Callable[[Mode], bool]) -> Callable[[Mode], bool]:
    return lambda mode: first(mode) and second(mode)


def _pd(mode: Mode) -> bool:
    return mode.pd


def _sglang_pd(mode: Mode) -> bool:
    return mode.legs_at_once and not mode.grpc


def _vllm_pd(mode: Mode) -> bool:
    return mode.pd and mode.engine == "vllm"


def _sglang(mode: Mode) -> bool:
    return mode.engine == "sglang" and not mode.grpc


FIRST, SECOND, ALL = slice(0, 1), slice(1, 2), slice(None)
_BAD = {"temperature": -1}
_LONG_PROMPT = [{"role": "user", "content": "word " * 40_000}]


def _failures() -> Iterable[Case]:
    def case(row: str, where: Callable[[Mode], bool], **told: Any) -> Case:
        return Case(row, partial(failing, **told), where, thorough=told["status"] != 429 or where is _pd)

    for status in (429, 500, 503):
        yield case(f"one of two workers answers {status}", _regular, status=status, workers=FIRST, requests=4)
    for status in (429, 500, 503):
        yield case(f"all workers answer {status}", _regular, status=status, workers=ALL)
    yield case("all workers answer 429, streamed", _regular, status=429, workers=ALL, stream=True)
    for role, which in (("prefill", FIRST), ("decode", SECOND)):
        for status in (429, 503):
            yield case(f"the {role} answers {status}", _pd, status=status, workers=which)
    yield case("the decode answers 429, streamed", _pd, status=429, workers=SECOND, stream=True)


CASES: tuple[Case, ...] = (
    *(
        Case(f"`{shape.path}`{', streamed' if stream else ''}", partial(plain, shape=shape, stream=stream))
        for shape in SHAPES
        for stream in (False, True)
    ),
    Case("`/v1/models`", listed),
    *(Case(one.row, partial(same, one=one)) for one in SAME),
    Case("four requests at two workers", turns, _in_turns),
    Case("`max_tokens` arrives as", renamed, _http),
    Case("an unknown field is", unknown_field, _http),
    Case("`model` of `/generate` arrives as", model_of_generate, _sglang),
    Case("the bootstrap triple is", bootstrap_triple, _sglang_pd),
    Case("the decode reads what the prefill computed", read, _vllm_pd),
    Case("headers passed on", forwarded, _http),
    Case("`x-request-id` of the answer is", request_id),
    Case("400 for a bad parameter", partial(passed, body=_chat(**_BAD))),
    Case("400 for a prompt that is too long", partial(passed, body=_chat(messages=_LONG_PROMPT))),
    Case("404 for an unknown model", partial(passed, body=_chat(model="nobody"))),
    *_failures(),
    *(
        Case(f"the client leaves {'a stream' if stream else 'before its whole answer'}", partial(leaving, stream=stream))
        for stream in (True, False)
    ),
    *(
        Case(
            f"the client leaves before the first token, {'streamed' if stream else 'whole'}",
            partial(leaving_before_the_first_token, stream=stream),
            lambda mode: not (mode.grpc and mode.legs_at_once),
        )
        for stream in (True, False)
    ),
    Case("a worker's connection breaks in a stream", cut, _http),
    Case("a worker's process has gone", dead, _both(_http, _regular), last=True),
)
