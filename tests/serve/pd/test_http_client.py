"""What a hostile host name does to the client that asks it."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.serve.live import PATIENCE_S

from windtunnel.serve.pd.http_client import ANSWER_LIMIT_BYTES, HttpAsker, NoAnswer, ask

HOSTILE = {
    "surrogate": "http://\ud800/",
    "long": "http://" + "a" * 300 + "/",
    "path": "http://127.0.0.1:1/\ud800",
    "bracket": "http://[::1",
}


@pytest.mark.parametrize("url", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_host_that_is_none_is_no_answer(url: str) -> None:
    asker = HttpAsker()
    with pytest.raises(NoAnswer):
        await asker.ask("GET", url, httpx.Timeout(5))
    await asker.close()


async def test_an_answer_without_an_end_is_no_answer() -> None:
    """It is not read any further than the limit, and not kept."""

    async def pour(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    asker = HttpAsker()
    with pytest.raises(NoAnswer, match=f"over {ANSWER_LIMIT_BYTES} bytes"):
        await asker.ask("GET", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/query", httpx.Timeout(60))
    await asker.close()
    server.close()


class Drips(httpx.AsyncByteStream):
    """Never silent for so long that a read times out, as far as the client can tell, and never done."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()


async def test_an_answer_that_takes_for_ever_is_no_answer() -> None:
    """A timeout of httpx is one read's, and each byte begins it again."""
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, stream=Drips()))
    async with httpx.AsyncClient(transport=transport) as client, asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoAnswer, match=r"no whole answer within 0\.02 s"):
            await ask(client, "GET", "http://one/query", httpx.Timeout(0.01))
