"""What a hostile host name does to the client that asks it."""

import asyncio

import httpx
import pytest

from windtunnel.serve.pd.http_client import ANSWER_LIMIT_BYTES, HttpAsker, NoAnswer

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
