"""What clients see when the process stops or its engine dies; real processes, real signals (vLLM reference §3.9)."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator

import pytest
from tests.serve.golden import split
from tests.serve.live import PATIENCE_S, RawClient, request_bytes

COMPLETION = {"model": "m", "prompt": "storm [wt:7]", "max_tokens": 20, "ignore_eos": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True}
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


class ServerProcess:
    def __init__(self, process: asyncio.subprocess.Process, port: int, told: str) -> None:
        self.process = process
        self.port = port
        self.told = told
        """On stderr, up to its address."""

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def get(self, path: str) -> int:
        client = await RawClient.connect(self.port)
        client.send(f"GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        return split(await client.read_all())[0]

    async def post(self, path: str, body: dict[str, object]) -> RawClient:
        client = await RawClient.connect(self.port)
        client.send(request_bytes(path, body, extra="Connection: close\r\n"))
        return client

    async def streaming(self) -> RawClient:
        """A stream that has its first token."""
        client = await self.post("/v1/completions", COMPLETION | {"stream": True})
        await client.read_until(b"data: ")
        return client

    async def refused(self) -> None:
        """Wait until the port is closed."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    (await RawClient.connect(self.port)).leave("fin")
                except ConnectionError:
                    return


@contextlib.asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[ServerProcess]:
    command = [sys.executable, "-m", "windtunnel", "serve", "m", "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env={**os.environ})
    try:
        yield ServerProcess(process, *await _port(process))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _port(process: asyncio.subprocess.Process) -> tuple[int, str]:
    assert process.stderr is not None
    told = ""
    async with asyncio.timeout(PATIENCE_S):
        while line := (await process.stderr.readline()).decode():
            told += line
            if found := _ADDRESS.search(line):
                asyncio.get_running_loop().create_task(_drain(process.stderr))
                return int(found[1]), told
    raise AssertionError("the server did not start")


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


async def test_sigterm_ends_requests_with_errors() -> None:
    async with serving("--itl", "1h") as server:
        stream, whole = await server.streaming(), await server.post("/v1/completions", COMPLETION)
        chat = await server.post("/v1/chat/completions", CHAT)
        await jobs(server, 3)
        server.term()
        tail = await stream.read_all()
        assert tail.count(b"InternalServerError") == tail.count(b"data: [DONE]") == 1
        assert tail.endswith(b"0\r\n\r\n")
        assert split(await whole.read_all())[0] == split(await chat.read_all())[0] == 500
        assert await server.exit_code() == 0


async def jobs(server: ServerProcess, count: int) -> None:
    """Wait until so many requests are at work."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            client = await RawClient.connect(server.port)
            client.send(b"GET /debug/requests HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            if f'"jobs":{count},'.encode() in await client.read_all():
                return


async def test_sigterm_clean_outcome() -> None:
    async with serving("--itl", "1h", "--shutdown-outcome", "clean") as server:
        stream, whole = await server.streaming(), await server.post("/v1/completions", COMPLETION)
        await jobs(server, 2)
        server.term()
        assert (await stream.read_all()).count(b'"finish_reason":"abort"') == 1
        status, _, body = split(await whole.read_all())
        assert (status, body.count(b'"finish_reason":"abort"')) == (200, 1)
        assert await server.exit_code() == 0


async def test_sigterm_hang_outcome_ends_when_the_client_gives_up() -> None:
    async with serving("--itl", "1h", "--shutdown-outcome", "hang") as server:
        stream = await server.streaming()
        server.term()
        await server.refused()
        assert server.process.returncode is None
        stream.leave("rst")
        assert await server.exit_code() == 0


async def test_sigterm_hang_outcome_yields_to_a_second_signal() -> None:
    async with serving("--itl", "1h", "--shutdown-outcome", "hang") as server:
        await_me = await server.streaming()
        server.term()
        await server.refused()
        server.term()
        assert await server.exit_code() == 0
        assert b"[DONE]" not in await await_me.read_all()


async def test_drain_finishes_what_is_at_work_and_answers_newcomers_emptily() -> None:
    async with serving("--itl", "1h", "--shutdown-timeout", "60") as server:
        stream = await server.streaming()
        server.term()
        while True:
            status, _, body = split(await (await server.post("/v1/completions", COMPLETION | {"max_tokens": 1})).read_all())
            assert status == 200
            if b'"finish_reason":"abort"' in body:
                break
        assert b'"text":""' in body
        newcomer = await (await server.post("/v1/completions", COMPLETION | {"stream": True})).read_all()
        assert newcomer.count(b'"finish_reason":"abort"') == newcomer.count(b"[DONE]") == 1
        status, _, body = split(await (await server.post("/v1/chat/completions", CHAT)).read_all())
        assert (status, b"cannot schedule new futures after shutdown" in body) == (500, True)
        assert await server.get("/health") == 200
        stream.leave("fin")
        assert await server.exit_code() == 0


async def test_drain_lets_a_stream_run_to_its_end() -> None:
    async with serving("--itl", "20ms", "--shutdown-timeout", "60s") as server:
        stream = await server.streaming()
        server.term()
        assert (await stream.read_all()).count(b'"finish_reason":"length"') == 1
        assert await server.exit_code() == 0


async def test_drain_has_an_end() -> None:
    async with serving("--itl", "1h", "--shutdown-timeout", "50ms") as server:
        stream = await server.streaming()
        server.term()
        assert (await stream.read_all()).count(b"InternalServerError") == 1
        assert await server.exit_code() == 0


async def test_a_second_sigterm_stops_a_drain() -> None:
    async with serving("--itl", "1h", "--shutdown-timeout", "3600") as server:
        stream = await server.streaming()
        server.term()
        await draining(server)
        server.term()
        assert await server.exit_code() == 0
        assert b"[DONE]" not in await stream.read_all()


async def draining(server: ServerProcess) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while split(await (await server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})).read_all())[0] != 500:
            pass


@pytest.mark.parametrize("stays", [False, True])
async def test_the_server_follows_its_engine_when_the_watchdog_has_seen_it(stays: bool) -> None:
    flags = ["--itl", "1h", "--watchdog-interval", "100ms", *(["--keep-alive-on-engine-death"] if stays else [])]
    async with serving(*flags) as server:
        stream = await server.streaming()
        assert await server.get("/health") == 200
        status, _, body = split(await (await server.post("/debug/engine_death", {})).read_all())
        assert (status, body) == (200, b'{"status":"dead","failed":1}')
        assert (await stream.read_all()).count(b"InternalServerError") == 1
        if stays:
            assert await server.get("/health") == 503
            assert split(await (await server.post("/v1/completions", COMPLETION)).read_all())[0] == 500
        else:
            assert await server.exit_code() == 0


async def test_the_address_is_not_buried_under_settings() -> None:
    async with serving("--itl", "30ms", "--api-key", "secret") as server:
        settings = json.loads(server.told.partition("non-default args: ")[2].partition("\n")[0])
        assert (settings["model"], settings["api_keys"], settings["pacing"]) == ("m", ["***"], {"itl_ns": 30_000_000})
        assert len(server.told) < 1000 and "secret" not in server.told
