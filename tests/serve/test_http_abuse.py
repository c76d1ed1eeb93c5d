"""Malformed and hostile HTTP over raw sockets: refused within limits, and the server goes on (docs/limits.md)."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from tests.serve.golden import split
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, RawClient, live, request_bytes
from tests.serve.test_operations import BODY

from windtunnel.serve.http11 import HeadSweeper

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
JSON = b'{"model":"wt-model","prompt":"hi","max_tokens":1}'
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n"

REFUSED = {
    "CL and TE": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two different CL": HEAD + b"Content-Length: 49\r\nContent-Length: 5\r\n\r\n" + JSON,
    "two equal CL": HEAD + b"Content-Length: 49\r\nContent-Length: 49\r\n\r\n" + JSON,
    "CL list": HEAD + b"Content-Length: 49, 49\r\n\r\n" + JSON,
    "negative CL": HEAD + b"Content-Length: -1\r\n\r\n" + JSON,
    "CL with sign": HEAD + b"Content-Length: +49\r\n\r\n" + JSON,
    "CL not a number": HEAD + b"Content-Length: 0x31\r\n\r\n" + JSON,
    "CL over 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + JSON,
    "TE not final": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "TE unknown": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "obsolete fold": HEAD + b"X-Folded: a\r\n b\r\nContent-Length: 49\r\n\r\n" + JSON,
    "space before colon": HEAD + b"Content-Length : 49\r\n\r\n" + JSON,
    "no colon": HEAD + b"Nonsense\r\nContent-Length: 49\r\n\r\n" + JSON,
    "NUL in header": HEAD + b"X-Nul: a\x00b\r\nContent-Length: 49\r\n\r\n" + JSON,
    "bare CR in header": HEAD + b"X-Cr: a\rb\r\nContent-Length: 49\r\n\r\n" + JSON,
    "chunk size not hex": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
    "chunk size negative": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nhi\r\n0\r\n\r\n",
    "chunk size over 64 bits": HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhi\r\n0\r\n\r\n",
    "chunk without its CRLF": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhiX\r\n0\r\n\r\n",
    "method unknown": b"FROB /version HTTP/1.1\r\nHost: t\r\n\r\n",
    "version unknown": b"GET /version HTTP/3.7\r\nHost: t\r\n\r\n",
    "binary": bytes(range(256)),
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
}


async def exchange(server: LiveServer, data: bytes) -> bytes:
    """Everything that the server says until it closes, or resets because it has not read everything."""
    client, said = await RawClient.connect(server.port), bytearray()
    client.send(data)
    client.writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(PATIENCE_S):
            while piece := await client.reader.read(65536):
                said += piece
    return bytes(said)


async def is_well(server: LiveServer) -> None:
    """A new client is served, and nothing is left behind."""
    client = await RawClient.connect(server.port)
    client.send(request_bytes("/v1/completions", BODY, extra="Connection: close\r\n"))
    assert split(await client.read_all())[0] == 200
    await server.until(lambda: not server.states() and not server.server.jobs)
    server.server.engine.check_integrity()


@pytest.mark.parametrize("shape", REFUSED)
async def test_malformed_requests_are_refused_and_never_run(shape: str) -> None:
    async with live() as server:
        answer = await exchange(server, REFUSED[shape])
        assert b"HTTP/1.1 200" not in answer
        assert b'"version"' not in answer
        assert answer == b"" or split(answer)[0] in (400, 413, 431)
        assert server.gauge("vllm:request_success_total") == 0
        await is_well(server)


HUGE_HEADS = {
    "one header": HEAD + b"X-Huge: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many headers": HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(100_000)) + b"\r\n",
}


@pytest.mark.parametrize("shape", HUGE_HEADS)
async def test_a_huge_head_is_refused(shape: str) -> None:
    async with live() as server:
        answer = await exchange(server, HUGE_HEADS[shape])
        assert answer == b"" or split(answer)[0] in (400, 431)
        await is_well(server)


async def test_a_small_limit_holds_for_a_head_in_one_read() -> None:
    async with live(limits__head_bytes=4096) as server:
        answer = await exchange(server, HEAD + b"X-Large: " + b"a" * 60_000 + b"\r\nContent-Length: 49\r\n\r\n" + JSON)
        assert answer.startswith(b"HTTP/1.1 431")


async def test_a_huge_url_is_refused() -> None:
    async with live(limits__head_bytes=4096) as server:
        answer = await exchange(server, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n")
        assert split(answer)[0] in (400, 431)
        await is_well(server)


def connections(server: LiveServer) -> list[Any]:
    return list(server.process.server_state.connections)


def sweeper_of(server: LiveServer) -> HeadSweeper:
    protocol: Any = server.process.config.http_protocol_class
    sweeper = protocol.sweeper
    assert isinstance(sweeper, HeadSweeper)
    return sweeper


def heads_are_late(server: LiveServer, since_s: float) -> None:
    """The sweeper's timer, by hand: whoever's head began before `since_s` has had the time for it, and nobody else."""
    sweeper, loop = sweeper_of(server), asyncio.get_running_loop()
    before, sweeper._timeout_s = sweeper._timeout_s, loop.time() - since_s
    sweeper._sweep(loop)
    sweeper._timeout_s = before


@pytest.mark.parametrize("drips", [0, 3])
async def test_a_slow_head_is_408(drips: int) -> None:
    """Also one that drips: its time counts from its first byte."""
    async with live(limits__head_timeout_ns=FOREVER_NS) as server:
        client = await RawClient.connect(server.port)
        client.send(b"GET /version HTTP/1.1\r\nHost: ")
        await server.until(lambda: [one._head_bytes for one in connections(server)] == [29])
        begun_s = asyncio.get_running_loop().time()
        for count in range(1, drips + 1):
            client.send(b"t\r\nX-Drip: ")
            await server.until(lambda: connections(server)[0]._head_bytes == 29 + 11 * count)  # noqa: B023  # awaited here
        heads_are_late(server, begun_s)
        assert (await client.read_all()).startswith(b"HTTP/1.1 408")
        await is_well(server)


async def test_a_head_that_is_still_in_its_time_is_waited_for() -> None:
    async with live(limits__head_timeout_ns=FOREVER_NS) as server:
        before_s = asyncio.get_running_loop().time()
        client = await RawClient.connect(server.port)
        client.send(b"GET /version HTTP/1.1\r\nHost: ")
        await server.until(lambda: [one._head_bytes for one in connections(server)] == [29])
        heads_are_late(server, before_s - 1)
        client.send(b"t\r\nConnection: close\r\n\r\n")
        assert (await client.read_all()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET", b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n"],
    ids=["nothing", "a piece", "a whole request"],
)
async def test_idle_connections_are_closed(sent: bytes) -> None:
    async with live(limits__head_timeout_ns=50_000_000, timeout_keep_alive_ns=1_000_000_000) as server:
        client = await RawClient.connect(server.port)
        client.send(sent)
        await client.read_all()
        sweeper_of(server)._timeout_s = 3600.0
        await is_well(server)


@pytest.mark.parametrize("head", [HEAD + b"Content-Length: 49\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n31\r\n"])
async def test_a_body_that_stops_short_and_leaves(head: bytes) -> None:
    async with live() as server:
        assert b"HTTP/1.1 200" not in await exchange(server, head + JSON[:20])
        client = await RawClient.connect(server.port)
        client.send(head + JSON[:20])
        await server.until(lambda: len(server.process.server_state.tasks) == 1)
        client.leave("rst")
        await server.until(lambda: not server.process.server_state.tasks)
        await is_well(server)


async def test_a_body_that_stops_short_and_stays_is_408() -> None:
    async with live(limits__body_timeout_ns=50_000_000) as server:
        client = await RawClient.connect(server.port)
        client.send(HEAD + b"Content-Length: 49\r\n\r\n" + JSON[:20])
        assert split(await client.head())[0] == 408
        await is_well(server)


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_oversized_body_is_413_in_json(chunked: bool) -> None:
    async with live(limits__body_bytes=1000) as server:
        body = b"x" * 3000
        if chunked:
            data = (
                HEAD
                + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
                + b"3e8\r\n%b\r\n" % body[:1000] * 3
                + b"0\r\n\r\n"
            )
        else:
            data = HEAD + b"Connection: close\r\nContent-Length: 3000\r\n\r\n" + body
        client = await RawClient.connect(server.port)
        client.send(data)
        status, headers, answer = split(await client.read_all())
        assert (status, dict(headers)["content-type"]) == (413, "application/json")
        assert b"1000 bytes" in answer
        await is_well(server)


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_a_body_announced_as_too_large_is_413_before_it_comes(path: bytes, more: bytes) -> None:
    async with live(limits__body_bytes=1000) as server:
        client = await RawClient.connect(server.port)
        client.send(HEAD.replace(b"/v1/completions", path) + more + b"Content-Length: 1000000000\r\n\r\n")
        status, headers, _ = split(await client.head())
        assert (status, dict(headers)["connection"]) == (413, "close")
        assert b"1000 bytes" in await client.read_until(b"}")
        client.leave("fin")
        await is_well(server)


async def test_an_endless_body_is_cut() -> None:
    async with live(limits__body_bytes=1000) as server:
        client = await RawClient.connect(server.port)
        client.send(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        reading = asyncio.ensure_future(client.read_all())
        sent = 0
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done() and sent < 50_000_000:
                client.send(b"x" * 10_000)
                sent += 10_000
                await asyncio.sleep(0)
        assert sent < 50_000_000
        assert reading.exception() is not None or split(reading.result())[0] == 413
        await is_well(server)


async def test_pipelining_beyond_the_limit_cuts_the_connection() -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server:
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY | {"stream": True}))
        await server.until(lambda: server.states() == ["decode"])
        client.send(SMUGGLED * 5000)
        await server.until(lambda: not server.states() and not server.server.jobs)
        server.server.engine.check_integrity()


async def test_two_hundred_idle_connections_do_no_harm() -> None:
    async with live() as server:
        clients = [await RawClient.connect(server.port) for _ in range(200)]
        await is_well(server)
        for client in clients:
            client.leave("fin")


async def test_requests_on_connections_over_the_limit_get_503() -> None:
    async with live(limits__connections=5) as server:
        clients = [await RawClient.connect(server.port) for _ in range(5)]
        await server.until(lambda: len(server.process.server_state.connections) == 5)
        extra = await RawClient.connect(server.port)
        extra.send(SMUGGLED)
        assert split(await extra.read_until(b"Service Unavailable"))[0] == 503
        extra.leave("fin")
        for client in clients:
            client.leave("fin")
        await server.until(lambda: not server.process.server_state.connections)
        await is_well(server)


async def slow_reader(server: LiveServer, max_tokens: int) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port))
    body = BODY | {"stream": True, "max_tokens": max_tokens, "return_token_ids": True}
    await asyncio.get_running_loop().sock_sendall(raw, request_bytes("/v1/completions", body, extra="Connection: close\r\n"))
    return raw


async def test_a_reader_that_never_reads_is_cut_after_the_deadline_with_a_bounded_buffer() -> None:
    limits = {"limits__write_buffer_bytes": 8192, "limits__write_deadline_ns": 200_000_000}
    async with live(**limits, scheduler__max_model_len=32000) as server:
        raw = await slow_reader(server, 31000)
        most = 0

        def gone() -> bool:
            nonlocal most
            most = max([most, *(c.transport.get_write_buffer_size() for c in server.process.server_state.connections)])
            return bool(server.server.driver.steps) and not server.process.server_state.connections

        await server.until(gone)
        assert 8192 <= most < 1_500_000
        raw.close()
        await is_well(server)


async def test_a_slow_reader_gets_every_token_in_merged_pieces() -> None:
    async with live(limits__write_buffer_bytes=8192, scheduler__max_model_len=32000) as server:
        raw = await slow_reader(server, 20000)
        await server.until(lambda: bool(server.server.driver.steps) and not server.states())
        assert server.gauge("vllm:request_success_total") == 1
        loop, received = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while piece := await loop.sock_recv(raw, 65536):
                received += piece
        raw.close()
        frames = received.count(b'"text":')
        assert received.endswith(b"0\r\n\r\n")
        assert received.count(b"data: [DONE]") == 1
        assert 2 <= frames < 19000
        await is_well(server)
