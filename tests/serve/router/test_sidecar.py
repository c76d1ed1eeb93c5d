"""The router as the llm-d sidecar (vLLM reference §7.4): bodies, headers, errors, and a client that leaves in any phase."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.router.fake_worker import PATIENCE_S, FakeWorker, router, workers

from windtunnel.cli.router import parse
from windtunnel.serve.asgi import ClientGone
from windtunnel.serve.router.config import RouterConfig, SidecarConfig
from windtunnel.serve.router.proxy import Proxy
from windtunnel.serve.router.sidecar import Sidecar
from windtunnel.wire.sglang.pairing import PrefillAddress
from windtunnel.wire.vllm.pairing import REMOTE_DECODE

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
CACHED = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}, "kv_transfer_params": PARAMS}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as one:
        yield one


@contextlib.asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[FakeWorker, FakeWorker, str]]:
    async with workers(200, 200) as (p, d):
        p.answer = CACHED
        prefills = (PrefillAddress(p.url, "127.0.0.1", None),)
        async with router(sidecar=SidecarConfig(**settings), prefills=prefills, decodes=(d.url,)) as url:
            yield p, d, url


def _place(worker: FakeWorker) -> str:
    return urlsplit(worker.url).netloc


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_both_legs_of_a_request(client: httpx.AsyncClient) -> None:
    body = {"messages": [], "max_tokens": 5, "stream_options": {"include_usage": True}, "stream": False, "foo": 1}
    async with pair() as (p, d, url):
        headers = {"x-request-id": "mine", "x-session-id": "s", "x-prefiller-host-port": _place(p)}
        answer = await client.post(url + CHAT, json=body, headers=headers)
    assert answer.json() == {"from": d.url, "path": CHAT}
    ones = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
    assert p.bodies == [{"messages": [], "foo": 1, "stream": False, "kv_transfer_params": dict(REMOTE_DECODE)} | ones]
    assert d.bodies == [body | {"kv_transfer_params": PARAMS}]
    for worker in (p, d):
        ids = [value for name, value in worker.raw_headers[0] if name == b"x-request-id"]
        assert ids[0] == b"mine" and len(ids[1]) == 36
        assert worker.headers[0]["x-session-id"] == "s"
        assert "x-prefiller-host-port" not in worker.headers[0]
    assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"], "one id for both legs"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_usage_has_the_prefills_cached_tokens(streamed: bool, client: httpx.AsyncClient) -> None:
    usage: dict[str, Any] = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    async with pair() as (_p, d, url):
        d.answer = {"id": "1", "usage": usage}
        last = b"data: " + json.dumps({"choices": [], "usage": usage | {"prompt_tokens_details": None}}).encode() + b"\n\n"
        frames = b'data: {"id":"a","usage":null}\n\n' + last + b"data: [DONE]\n\n"
        d.frames = tuple(frames[at : at + 7] for at in range(0, len(frames), 7))
        answer = await client.post(url + CHAT, json={"messages": [], "stream": streamed})
    if streamed:
        lines = answer.text.split("\n\n")
        assert lines[0] == 'data: {"id":"a","usage":null}'
        assert json.loads(lines[1][6:])["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 7}}
        assert lines[2:] == ["data: [DONE]", ""]
    else:
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


async def test_a_header_may_name_several_and_the_first_is_taken(client: httpx.AsyncClient) -> None:
    async with pair() as (p, _d, url):
        header = {"x-prefiller-host-port": f"{_place(p)}, other:1"}
        assert (await client.post(url + CHAT, json={}, headers=header)).status_code == 200
        header = {"x-prefiller-host-port": f"other:1, {_place(p)}"}
        denied = await client.post(url + CHAT, json={}, headers=header)
        lines = [("x-prefiller-host-port", _place(p)), ("x-prefiller-host-port", "other:1")]
        assert (await client.post(url + CHAT, json={}, headers=lines)).status_code == 200
    assert (denied.status_code, denied.headers["content-type"]) == (403, "text/plain; charset=utf-8")
    assert "not allowed" in denied.text
    assert len(p.bodies) == 2


async def test_with_sampling_any_of_them_is_taken(client: httpx.AsyncClient) -> None:
    async with pair(sampling=True) as (p, _d, url):
        header = {"x-prefiller-host-port": f"other:1, {_place(p)}"}
        statuses = {(await client.post(url + CHAT, json={}, headers=header)).status_code for _ in range(40)}
    assert statuses == {200, 403}


async def test_without_a_header_the_prefills_take_turns_or_there_is_none(client: httpx.AsyncClient) -> None:
    async with pair() as (p, d, url):
        await client.post(url + CHAT, json={})
        assert (len(p.bodies), len(d.bodies)) == (1, 1)
    async with pair(header_only=True) as (p, d, url):
        await client.post(url + CHAT, json={"a": 1})
        assert (p.bodies, d.bodies) == ([], [{"a": 1}])


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_a_prefills_error_is_the_clients(status: int, client: httpx.AsyncClient) -> None:
    async with pair(retries=3) as (p, d, url):
        p.answer = {"error": {"message": "no"}}
        p.failures = [status]
        answer = await client.post(url + CHAT, json={"stream": True})
        assert (answer.status_code, answer.json()) == (status, p.answer)
        assert (len(p.bodies), d.bodies) == (1, [])


@pytest.mark.parametrize(("retries", "want", "tries"), [(0, 503, 1), (1, 502, 2), (2, 200, 3)])
async def test_a_busy_prefill_is_asked_again(retries: int, want: int, tries: int, client: httpx.AsyncClient) -> None:
    async with pair(retries=retries, retry_backoff_s=0.0) as (p, _d, url):
        p.failures = [503, 502]
        assert (await client.post(url + CHAT, json={})).status_code == want
        assert len(p.bodies) == tries


async def test_a_prefill_that_says_nothing_leaves_the_decode_with_null(client: httpx.AsyncClient) -> None:
    async with pair() as (p, d, url):
        p.answer = {"usage": {}}
        assert (await client.post(url + CHAT, json={})).status_code == 200
        assert d.bodies[0]["kv_transfer_params"] is None


async def test_own_errors_are_flat(client: httpx.AsyncClient) -> None:
    async with pair() as (p, d, url):
        broken = await client.post(url + CHAT, content=b"{")
        assert (broken.status_code, broken.json()["type"]) == (400, "BadRequestError")
        assert set(broken.json()) == {"object", "message", "type", "param", "code"}
        assert not p.bodies
    nowhere = PrefillAddress("http://127.0.0.1:1", "127.0.0.1", None)
    async with router(sidecar=SidecarConfig(), prefills=(nowhere,), decodes=(d.url,)) as url:
        gone = await client.post(url + CHAT, json={})
        assert (gone.status_code, gone.json()["type"]) == (502, "BadGateway")
    async with workers(200) as (p,):
        prefills = (PrefillAddress(p.url, "127.0.0.1", None),)
        async with router(sidecar=SidecarConfig(), prefills=prefills, decodes=("http://127.0.0.1:1",)) as url:
            gone = await client.post(url + CHAT, json={})
    assert (gone.status_code, gone.json()["type"], gone.json()["code"]) == (503, "ServiceUnavailable", 503)


async def test_other_paths_go_to_the_decode(client: httpx.AsyncClient) -> None:
    async with pair() as (p, d, url):
        answer = await client.post(f"{url}/tokenize", json={"prompt": "a"})
    assert (answer.json()["path"], p.bodies, d.bodies) == ("/tokenize", [], [{"prompt": "a"}])


# A client that leaves


@contextlib.contextmanager
def leaving(url: str, *, stream: bool) -> Iterator[Any]:
    """Sends a request; the yielded coroutine function leaves."""
    writers: list[asyncio.StreamWriter] = []

    async def send() -> None:
        _reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        body = json.dumps({"messages": [], "stream": stream}).encode()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        writers.append(writer)

    yield send, lambda: writers[0].close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_departure", [True, False])
async def test_leaving_during_the_prefill_ends_it_and_there_is_no_decode(stream: bool, after_departure: bool) -> None:
    async with pair(decode_after_departure=after_departure) as (p, d, url):
        p.go.clear()
        with leaving(url, stream=stream) as (send, leave):
            await send()
            await _until(lambda: p.bodies)
            leave()
            await _until(lambda: p.gone == 1)
        assert not d.bodies


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_departure", [True, False])
async def test_leaving_during_the_decode_ends_it(stream: bool, after_departure: bool) -> None:
    async with pair(decode_after_departure=after_departure) as (p, d, url):
        d.go.clear()
        with leaving(url, stream=stream) as (send, leave):
            await send()
            await _until(lambda: d.bodies)
            leave()
            await _until(lambda: d.gone == 1)
        assert len(p.bodies) == 1


class SeeingProxy(Proxy):
    """Says when the prefill's answer has been read."""

    def __init__(self) -> None:
        super().__init__(20.0, 8)
        self.read = asyncio.Event()

    async def whole(self, *args: Any) -> httpx.Response:
        answer = await super().whole(*args)
        self.read.set()
        return answer


async def _left_between_the_legs(p: FakeWorker, d: FakeWorker, stream: bool, **fields: Any) -> None:
    settings = SidecarConfig(between_legs_s=3600.0, **fields)
    config = RouterConfig(sidecar=settings, prefills=(PrefillAddress(p.url, "", None),), decodes=(d.url,))
    proxy = SeeingProxy()
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def leave() -> dict[str, Any]:
        await proxy.read.wait()
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    with pytest.raises(ClientGone):
        await Sidecar(settings, config, proxy).route(scope, json.dumps({"stream": stream}).encode(), leave, send)
    await proxy.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_between_the_legs_means_no_decode(stream: bool) -> None:
    """The prefill has finished, so its blocks stay for the whole lease: nobody tells it."""
    async with workers(200, 200) as (p, d):
        await _left_between_the_legs(p, d, stream)
    assert (len(p.bodies), p.gone, d.bodies) == (1, 0, [])


@pytest.mark.parametrize("stream", [True, False])
async def test_with_the_switch_the_decode_is_sent_until_its_first_token(stream: bool) -> None:
    async with workers(200, 200) as (p, d):
        p.answer = CACHED
        d.stays_after_first = True
        await _left_between_the_legs(p, d, stream, decode_after_departure=True)
        await _until(lambda: d.cut == 1)
    assert d.bodies == [{"stream": True, "kv_transfer_params": PARAMS}]


# Flags


def test_flags() -> None:
    config = parse(
        "--vllm-pd-disaggregation --prefill http://h:1 --decode http://h:2 --prefill-retries 2 --prefill-retry-backoff 50ms "
        "--between-legs 1s --decode-after-departure --header-only --prefill-sampling".split()
    )
    assert config.sidecar == SidecarConfig(True, True, 2, 0.05, 1.0, True)
    assert parse("--vllm-pd-disaggregation --prefill http://h:1 --decode http://h:2".split()).sidecar == SidecarConfig()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ("--vllm-pd-disaggregation", "--vllm-pd-disaggregation needs"),
        ("--vllm-pd-disaggregation --prefill http://h:1 --decode http://h:2 --pd-disaggregation", "exclude"),
        ("--worker-urls http://h:1 --between-legs 1s", "--vllm-pd-disaggregation"),
        ("--between-legs soon", "--between-legs"),
        ("--prefill-retries 101", "0 to 100"),
        ("--header-only yes", "switch"),
    ],
)
def test_bad_flags_are_named(args: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse(args.split())
