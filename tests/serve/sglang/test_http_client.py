"""What a hostile host name does to the client that asks it."""

import httpx
import pytest

from windtunnel.serve.sglang.http_client import HttpAsker, NoAnswer

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
