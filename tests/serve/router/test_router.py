"""The router: what `mini_lb` does with pairs (SGLang reference §2.4, clients §3), and the plain round."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.router.fake_worker import PATIENCE_S, router, workers

from windtunnel.cli.router import parse
from windtunnel.wire.sglang.pairing import PrefillAddress, batch_size, with_bootstrap


def _prefill(url: str, port: int | None = 8998) -> PrefillAddress:
    return PrefillAddress(url, "127.0.0.1", port)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as one:
        yield one


async def _until(condition: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


async def test_both_legs_get_the_same_body_and_the_client_the_decodes_answer(client: httpx.AsyncClient) -> None:
    async with workers(200, 200) as (p, d), router(pd=True, prefills=(_prefill(p.url),), decodes=(d.url,)) as url:
        headers = {"authorization": "Bearer k", "x-request-id": "mine", "x-session-id": "s"}
        answer = await client.post(f"{url}/v1/completions", json={"prompt": "a", "unknown": 1}, headers=headers)
        assert answer.json() == {"from": d.url, "path": "/v1/completions"}
        assert p.bodies == d.bodies
        (body,) = d.bodies
        assert body["unknown"] == 1
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert 0 < body["bootstrap_room"] < 1 << 63
        assert d.headers[0]["authorization"] == "Bearer k" and d.headers[0]["x-request-id"] == "mine"
        assert "x-session-id" not in d.headers[0]


async def test_a_batch_gets_lists(client: httpx.AsyncClient) -> None:
    async with workers(200, 200) as (p, d), router(pd=True, prefills=(_prefill(p.url, None),), decodes=(d.url,)) as url:
        await client.post(f"{url}/generate", json={"text": ["a", "b"]})
        (body,) = d.bodies
        assert body["bootstrap_host"] == ["127.0.0.1"] * 2 and body["bootstrap_port"] == [None, None]
        assert len(set(body["bootstrap_room"])) == 2


@pytest.mark.parametrize(("prefill", "decode", "want"), [(500, 200, 200), (200, 503, 503), (500, 429, 429)])
async def test_the_status_is_the_decodes(prefill: int, decode: int, want: int, client: httpx.AsyncClient) -> None:
    async with workers(prefill, decode) as (p, d), router(pd=True, prefills=(_prefill(p.url),), decodes=(d.url,)) as url:
        answer = await client.post(f"{url}/generate", json={"text": "a"})
    assert answer.status_code == want


async def test_a_stream_is_passed_through_and_its_status_is_always_200(client: httpx.AsyncClient) -> None:
    async with workers(200, 503) as (p, d), router(pd=True, prefills=(_prefill(p.url),), decodes=(d.url,)) as url:
        answer = await client.post(f"{url}/generate", json={"text": "a", "stream": True})
    assert answer.status_code == 200
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(("stream", "noticed"), [(True, 2), (False, 0)])
async def test_only_a_client_that_leaves_a_stream_takes_both_legs_along(
    stream: bool, noticed: int, client: httpx.AsyncClient
) -> None:
    async with workers(200, 200) as (p, d), router(pd=True, prefills=(_prefill(p.url),), decodes=(d.url,)) as url:
        p.go.clear()
        d.go.clear()
        body = b'{"text": "a", "stream": true}' if stream else b'{"text": "a"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await _until(lambda: len(p.bodies) == len(d.bodies) == 1)
        writer.close()
        if noticed:
            await _until(lambda: p.gone + d.gone == noticed)
        else:
            # The router has seen the connection end when a second one, made later, is answered.
            await client.get(f"{url}/health")
            assert p.gone + d.gone == 0
        p.go.set()
        d.go.set()
        assert not await reader.read() or stream


async def test_a_worker_that_is_not_there_is_a_502(client: httpx.AsyncClient) -> None:
    async with workers(200) as (d,), router(pd=True, prefills=(_prefill("http://127.0.0.1:1"),), decodes=(d.url,)) as url:
        for stream in (True, False):
            answer = await client.post(f"{url}/generate", json={"text": "a", "stream": stream})
            assert answer.status_code == 502


async def test_plain_workers_take_turns_and_keep_their_status(client: httpx.AsyncClient) -> None:
    async with workers(200, 429) as (a, b), router(workers=(a.url, b.url)) as url:
        answers = [await client.post(f"{url}/v1/completions", json={"prompt": "a"}) for _ in range(4)]
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.post(f"{url}/flush_cache")).status_code == 429
    assert [answer.status_code for answer in answers] == [200, 429, 200, 429]
    assert [answer.json()["from"] for answer in answers] == [a.url, b.url, a.url, b.url]
    assert "bootstrap_room" not in a.bodies[0]


async def test_a_body_that_is_no_object_is_refused(client: httpx.AsyncClient) -> None:
    async with workers(200, 200) as (p, d), router(pd=True, prefills=(_prefill(p.url),), decodes=(d.url,)) as url:
        for raw in (b"{", b"[]"):
            assert (await client.post(f"{url}/generate", content=raw)).status_code == 400
    assert not d.bodies


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"text": "a"}, None),
        ({"text": ["a", "b", "c"]}, 3),
        ({"input_ids": [1, 2]}, None),
        ({"input_ids": [[1], [2]]}, 2),
        ({"prompt": [1, 2]}, None),
        ({"prompt": ["a"]}, 1),
        ({"messages": []}, None),
    ],
)
def test_how_many_prompts_a_body_has(body: dict[str, object], size: int | None) -> None:
    assert batch_size(body) == size


def test_room_zero_is_never_given() -> None:
    assert with_bootstrap({}, _prefill("http://p"), lambda limit: 0)["bootstrap_room"] == 1
    assert with_bootstrap({}, _prefill("http://p"), lambda limit: limit - 1)["bootstrap_room"] == (1 << 63) - 1


def test_flags() -> None:
    config = parse(
        ["--pd-disaggregation", "--prefill", "http://h:1", "8998", "--prefill", "http://h:2", "none", "--decode", "http://h:3"]
    )
    assert config.prefills == (PrefillAddress("http://h:1", "h", 8998), PrefillAddress("http://h:2", "h", None))
    assert config.decodes == ("http://h:3",)
    assert parse(["--worker-urls", "http://h:1", "http://h:2", "--port=0"]).workers == ("http://h:1", "http://h:2")


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ([], "--worker-urls"),
        (["--pd-disaggregation"], "--prefill"),
        (["--worker-urls", "ftp://h"], "ftp://h"),
        (["--prefill", "http://h:1", "99999"], "bootstrap port"),
        (["--nope"], "--nope"),
        (["--port", "x"], "--port"),
        (["lonely"], "lonely"),
    ],
)
def test_bad_flags_are_named(args: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse(args)
