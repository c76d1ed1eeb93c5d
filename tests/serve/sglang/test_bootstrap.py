"""The bootstrap server's routes and statuses (SGLang reference §2.1)."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from windtunnel.serve.sglang.bootstrap import Bootstrap, build

S = 1_000_000_000


class _Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
async def client(clock: _Clock) -> AsyncIterator[httpx.AsyncClient]:
    app: Any = build(Bootstrap(120 * S, clock))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap") as one:
        yield one


def _rank(tp: int = 0, dp: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "attn_tp_size": 2,
        "attn_tp_rank": tp,
        "attn_dp_size": 1,
        "attn_dp_rank": dp,
        "rank_ip": "10.0.0.1",
        "rank_port": 9000 + tp,
        "page_size": 4,
        "prefill_http_port": 30000,
        "anything_else": 1,
        **more,
    }


def _place(*numbers: int) -> dict[str, int]:
    return dict(zip(("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), numbers, strict=True))


async def test_nothing_is_told_until_all_ranks_are_there(client: httpx.AsyncClient) -> None:
    early = await client.get("/route", params=_place(-1, -1, -1, -1))
    assert early.status_code == 503
    assert (await client.put("/route", json=_rank(0))).text == "OK"
    half = await client.get("/route", params=_place(-1, -1, -1, -1))
    assert half.status_code == 503 and "1 of 2" in half.text
    await client.put("/route", json=_rank(1))
    whole = (await client.get("/route", params=_place(-1, -1, -1, -1))).json()
    assert (whole["attn_tp_size"], whole["dp_size"], whole["page_size"], whole["prefill_http_port"]) == (2, 1, 4, 30000)
    assert whole["follow_bootstrap_room"] is True and whole["target_tp_rank"] is None
    one = await client.get("/route", params=_place(0, 0, 1, 0))
    assert one.json() == {"rank_ip": "10.0.0.1", "rank_port": 9001}


async def test_wrong_questions_get_their_status(client: httpx.AsyncClient) -> None:
    for tp in (0, 1):
        await client.put("/route", json=_rank(tp))
    assert (await client.get("/route", params=_place(5, 0, 0, 0))).status_code == 404
    assert (await client.get("/route")).status_code == 400
    assert (await client.get("/route", params={"prefill_dp_rank": "x"})).status_code == 400
    assert (await client.post("/route")).status_code == 405
    assert (await client.get("/nowhere")).status_code == 404
    assert (await client.put("/route", json={"rank_ip": "10.0.0.1"})).status_code == 400
    assert (await client.put("/route", content=b"{")).status_code == 400
    assert (await client.put("/route", content=b"x" * 2_000_000)).status_code == 413
    assert (await client.get("/health")).text == "OK"


async def test_a_rank_that_contradicts_the_others_is_refused(client: httpx.AsyncClient) -> None:
    await client.put("/route", json=_rank(0))
    refused = await client.put("/route", json=_rank(1, page_size=16))
    assert refused.status_code == 400 and "page_size" in refused.text
    again = await client.put("/route", json=_rank(0, rank_port=9999))
    assert again.status_code == 200


async def test_rooms_are_found_until_they_are_old(client: httpx.AsyncClient, clock: _Clock) -> None:
    for room, rank in ((7, 1), (8, 3)):
        await client.post("/register_dp_rank", json={"bootstrap_room": room, "dp_rank": rank})
    asked = {"bootstrap_rooms": [7, 8, 9]}
    assert (await client.post("/query_dp_ranks", json=asked)).json() == {"7": 1, "8": 3}
    clock.now_ns = 100 * S
    await client.post("/register_dp_rank", json={"bootstrap_room": 9, "dp_rank": 0})
    clock.now_ns = 121 * S
    assert (await client.post("/query_dp_ranks", json=asked)).json() == {"9": 0}
