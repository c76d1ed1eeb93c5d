"""What a client of a session sees: each request goes on from an earlier one (SGLang 0.5.23, `session_controller.py`)."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.serve.sglang_live import NEVER_NS, events, talking

from windtunnel.serve.sglang.sessions import Sessions

PAGED: dict[str, Any] = {"sglang__page_size": 4}
FIRST = list(range(100, 124))


def turn(ids: list[int] | str, rid: str, after: str | None = None, *, max_new_tokens: int = 5, **params: Any) -> dict[str, Any]:
    given = {"text": ids} if isinstance(ids, str) else {"input_ids": ids}
    session = {"id": "s", "rid": after, **params}
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
    return {**given, "rid": rid, "session_params": session, "sampling_params": sampling}


async def opened(client: httpx.AsyncClient, **more: Any) -> None:
    answer = await client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s", **more})
    assert (answer.status_code, answer.json()) == (200, "s")


async def say(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def refusal(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 400
    message: str = answer.json()["error"]["message"]
    return message


async def test_a_request_goes_on_from_the_prompt_and_the_answer_of_the_one_it_names() -> None:
    async with talking(**PAGED) as (_server, client):
        await opened(client)
        first = await say(client, turn(FIRST, "a"))
        second = await say(client, turn([7, 8], "b", "a"))
        assert first["meta_info"]["prompt_tokens"] == 24
        assert second["meta_info"]["prompt_tokens"] == 24 + 5 + 2
        assert second["meta_info"]["cached_tokens"] >= 24
        third = await say(client, turn([9], "c", "b"))
        assert third["meta_info"]["prompt_tokens"] == 31 + 5 + 1
        fork = await say(client, turn([9], "d", "a"))
        assert fork["meta_info"]["prompt_tokens"] == 24 + 5 + 1
        alone = await say(client, turn([9] * 6, "e"))
        assert alone["meta_info"]["prompt_tokens"] == 6


async def test_the_answer_is_that_of_the_whole_prompt_sent_at_once() -> None:
    async with talking() as (_server, client):
        await opened(client)
        first = await say(client, turn("storm [wt:7] and", "a"))
        second = await say(client, turn(" then", "b", "a"))
        own = (await client.post("/v1/tokenize", json={"model": "m", "prompt": "storm [wt:7] and"})).json()["tokens"]
        more = (await client.post("/v1/tokenize", json={"model": "m", "prompt": " then"})).json()["tokens"]
        bos = own[0] == more[0]
        whole = [*own, *first["output_ids"], *more[bos:]]
        plain = await say(client, {"input_ids": whole, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}})
        assert second["output_ids"] == plain["output_ids"]
        assert second["meta_info"]["prompt_tokens"] == plain["meta_info"]["prompt_tokens"] == len(whole)


async def test_a_stream_is_part_of_its_session_too() -> None:
    async with talking() as (_server, client):
        await opened(client)
        told = events((await client.post("/generate", json=turn(FIRST, "a") | {"stream": True})).text)
        assert told[-2]["meta_info"]["completion_tokens"] == 5
        assert (await say(client, turn([7], "b", "a")))["meta_info"]["prompt_tokens"] == 24 + 5 + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [8, 9]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_only_the_native_route_makes_something_of_session_params(path: str, body: dict[str, Any]) -> None:
    """The models of the OpenAI routes have the field, and nothing in `serving_*.py` reads it."""
    async with talking() as (_server, client):
        asked = {"model": "m", "max_tokens": 2, **body}
        plain = (await client.post(path, json=asked)).json()
        told = await client.post(path, json=asked | {"session_params": {"id": "nowhere", "rid": "b"}})
        assert told.status_code == 200 and told.json()["usage"] == plain["usage"]


@pytest.mark.parametrize(
    ("params", "prompt_tokens"),
    [
        ({"drop_previous_output": True}, 24 + 2),
        ({"offset": 10}, 10 + 2),
        ({"offset": 26, "drop_previous_output": True}, 24 + 2),
        ({"offset": -9}, 24 + 5 - 9 + 2),
    ],
)
async def test_less_of_what_comes_before(params: dict[str, Any], prompt_tokens: int) -> None:
    async with talking() as (_server, client):
        await opened(client)
        await say(client, turn(FIRST, "a"))
        told = await say(client, turn([7, 8], "b", "a", **params))
        assert told["meta_info"]["prompt_tokens"] == prompt_tokens


async def test_replace_forgets_what_went_on_from_there() -> None:
    async with talking() as (_server, client):
        await opened(client)
        for rid, after in (("a", None), ("b", "a"), ("c", "b")):
            await say(client, turn(FIRST, rid, after))
        told = await say(client, turn([7], "d", "a", replace=True, offset=20))
        assert told["meta_info"]["prompt_tokens"] == 21
        for rid in ("b", "c"):
            assert await refusal(client, turn([7], "x", rid)) == "Invalid request session id"
        await say(client, turn([7], "e", "d"))
        await say(client, turn([7], "f", replace=True))
        assert await refusal(client, turn([7], "x", "a")) == "Invalid request session id"


async def test_a_name_that_is_used_again_takes_the_place_of_the_earlier_request() -> None:
    async with talking() as (server, client):
        await opened(client)
        await say(client, turn(FIRST, "a"))
        for _ in range(3):
            await say(client, turn([7], "b", "a"))
        flavour: Any = server.server.flavour
        (session,) = flavour.sessions._sessions.values()
        assert list(session.turns) == ["a", "b"] and len(session.turns["a"].after) == 1
        assert flavour.sessions._tokens == (24 + 5) + (24 + 5 + 1 + 5)


async def test_what_cannot_be_is_a_400_or_an_event_of_a_native_stream() -> None:
    async with talking() as (_server, client):
        gone = "Invalid request: session id s does not exist"
        assert await refusal(client, turn(FIRST, "a")) == gone
        native = await client.post("/generate", json=turn(FIRST, "a") | {"stream": True})
        assert native.status_code == 200 and events(native.text)[0]["error"]["message"] == gone
        await opened(client)
        assert await refusal(client, turn(FIRST, "b", "a")) == "Invalid request session id"
        again = await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        assert again.status_code == 400 and "still open" in again.json()["error"]["message"]
        streaming = await client.post("/open_session", json={"capacity_of_str_len": 1, "streaming": True})
        assert streaming.status_code == 400 and "--enable-streaming-session" in streaming.json()["error"]["message"]
        assert "batch" in await refusal(client, turn(FIRST, "a") | {"rid": None, "sampling_params": {"n": 2}})
        await say(client, turn(FIRST, "a"))
        assert (await client.post("/close_session", json={"session_id": "s"})).status_code == 200
        assert await refusal(client, turn([7], "b", "a")) == gone


async def test_a_request_at_work_cannot_be_gone_on_from_until_its_client_has_left() -> None:
    async with talking(pacing__itl_ns=NEVER_NS) as (server, client):
        await opened(client)
        asking = asyncio.ensure_future(client.post("/generate", json=turn(FIRST, "a", max_new_tokens=9)))
        await server.until(lambda: server.states() == ["decode"])
        unfinished = "Session request is appending to a request that hasn't finished."
        assert await refusal(client, turn([7], "b", "a")) == unfinished
        await client.post("/abort_request", json={"rid": "a"})
        assert (await asking).json()["meta_info"]["finish_reason"]["type"] == "abort"
        told = await say(client, turn([7], "b", "a", max_new_tokens=1))
        assert told["meta_info"]["prompt_tokens"] == 24 + 1 + 1


async def test_replace_ends_a_request_at_work() -> None:
    async with talking(pacing__itl_ns=NEVER_NS) as (server, client):
        await opened(client)
        asking = asyncio.ensure_future(client.post("/generate", json=turn(FIRST, "a", max_new_tokens=9)))
        await server.until(lambda: server.states() == ["decode"])
        told = await say(client, turn([7], "b", "a", replace=True, drop_previous_output=True, max_new_tokens=1))
        assert told["meta_info"]["prompt_tokens"] == 25
        assert (await asking).json()["meta_info"]["finish_reason"]["type"] == "abort"
        server.server.engine.check_integrity()


async def test_each_turn_of_a_dropped_tree_is_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each that it has gone on from: a chain of 1,000 turns would be half a million."""
    async with talking() as (_server, client):
        await opened(client)
        names = ["a", "b", "c", "d"]
        for name, before in zip(names, [None, *names], strict=False):
            await say(client, turn([1, 2, 3], name, before))
        dropped: list[str] = []
        monkeypatch.setattr(Sessions, "_forget", lambda _, gone, __: dropped.append(gone.rid))
        await say(client, turn([1, 2, 3], "e", replace=True))
        assert sorted(dropped) == names


@pytest.mark.parametrize("after", ["a", None], ids=["one", "all"])
async def test_replace_leaves_alone_who_has_the_id_of_an_ended_request(after: str | None) -> None:
    async with talking(pacing__itl_ns=NEVER_NS) as (server, client):
        await opened(client)
        await say(client, turn(FIRST, "a", max_new_tokens=1))
        other = turn(FIRST, "a", max_new_tokens=9) | {"session_params": None}
        asking = asyncio.ensure_future(client.post("/generate", json=other))
        await server.until(lambda: server.states() == ["decode"])
        await say(client, turn([7], "b", after, replace=True, max_new_tokens=1))
        assert server.states() == ["decode"]
        await client.post("/abort_request", json={"rid": "a"})
        assert (await asking).json()["meta_info"]["completion_tokens"] == 1


async def test_a_session_that_is_left_alone_is_closed() -> None:
    """With a timeout of nothing the name is free again at once, and what was in the session is gone."""
    async with talking() as (_server, client):
        await opened(client, timeout=0)
        await opened(client, timeout=0)
        assert await refusal(client, turn(FIRST, "a")) == "Invalid request: session id s does not exist"
        await opened(client, timeout=3600)
        await say(client, turn(FIRST, "a"))


async def test_the_context_is_that_of_the_joined_prompt() -> None:
    async with talking(scheduler__max_model_len=40, sglang__page_size=1) as (server, client):
        await opened(client)
        await say(client, turn(FIRST, "a"))
        told = await say(client, turn([7], "b", "a", max_new_tokens=30))
        assert told["meta_info"]["completion_tokens"] == 39 - 30 - 1 and told["meta_info"]["finish_reason"]["type"] == "length"
        long = "Input length (39 tokens) exceeds the maximum allowed length (34 tokens)."
        assert (await refusal(client, turn([7] * 10, "c", "a", max_new_tokens=1))).startswith(long)
        assert (await say(client, turn([7], "d", "c")))["meta_info"]["prompt_tokens"] == 1 + 1 + 1
        server.server.engine.check_integrity()


async def test_what_the_queue_has_no_place_for_keeps_its_own_in_the_session() -> None:
    """It never gets a finish reason, so that only `replace` goes on from it; so does one that is aborted while it waits."""
    narrow = {"sglang__max_queued_requests": 1, "sglang__max_running_requests": 1, "pacing__itl_ns": NEVER_NS}
    async with talking(**narrow) as (server, client):
        await opened(client)
        await say(client, turn(FIRST, "a", max_new_tokens=1))
        running = asyncio.ensure_future(client.post("/generate", json=turn(FIRST, "r", max_new_tokens=9)))
        await server.until(lambda: server.states() == ["decode"])
        waiting = asyncio.ensure_future(client.post("/generate", json=turn([7], "w", "a", max_new_tokens=1)))
        await server.until(lambda: sorted(server.states()) == ["decode", "queued"])
        full = await client.post("/generate", json=turn([8], "f", "a", max_new_tokens=1))
        assert (full.status_code, full.json()["message"]) == (503, "The request queue is full.")
        for rid in ("w", "r"):
            await client.post("/abort_request", json={"rid": rid})
        assert (await waiting).json()["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
        for rid in ("w", "f"):
            unfinished = "Session request is appending to a request that hasn't finished."
            assert await refusal(client, turn([9], "x", rid, max_new_tokens=1)) == unfinished
            told = await say(client, turn([9], f"{rid}2", rid, replace=True, max_new_tokens=1))
            assert told["meta_info"]["prompt_tokens"] == 24 + 1 + 1 + 1
        assert (await say(client, turn([9], "r2", "r", max_new_tokens=1)))["meta_info"]["prompt_tokens"] == 24 + 1 + 1


async def test_what_cannot_join_has_no_place() -> None:
    async with talking() as (_server, client):
        await opened(client)
        await say(client, turn(FIRST, "a"))
        assert await refusal(client, turn([7], "b", "nobody")) == "Invalid request session id"
        assert await refusal(client, turn([7], "c", "b")) == "Invalid request session id"
        await say(client, turn([7], "b", "a"))
        assert await refusal(client, turn([], "c")) == "A session request must contain input tokens after restoring history."
        assert await refusal(client, turn([7], "d", "c")) == "Invalid request session id"


async def test_the_session_may_be_the_whole_prompt() -> None:
    async with talking() as (_server, client):
        await opened(client)
        await say(client, turn(FIRST, "a"))
        assert (await say(client, turn([], "b", "a")))["meta_info"]["prompt_tokens"] == 24 + 5
        empty = await client.post("/generate", json={"input_ids": [], "sampling_params": {"max_new_tokens": 1}})
        assert empty.status_code == 400


async def test_an_answer_that_a_stop_text_has_ended_goes_on_at_once_from_what_its_client_saw() -> None:
    async with talking() as (_server, client):
        await opened(client)
        whole = await say(client, {"input_ids": FIRST, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}})
        third = whole["text"].split()[2]
        asked = turn(FIRST, "a", max_new_tokens=50)
        asked["sampling_params"] |= {"stop": [third]}
        told = await say(client, asked)
        assert told["meta_info"]["finish_reason"]["matched"] == third
        more = await say(client, turn([7], "b", "a"))
        assert more["meta_info"]["prompt_tokens"] == 24 + told["meta_info"]["completion_tokens"] + 1


async def test_a_session_by_two_names() -> None:
    async with talking() as (_server, client):
        told = await refusal(client, turn(FIRST, "a") | {"session_id": "s"})
        assert told == "session_id and session_params cannot both be set."


async def test_an_id_that_is_at_work_leaves_the_session_as_it_is() -> None:
    async with talking(pacing__itl_ns=NEVER_NS) as (server, client):
        await opened(client)
        running = asyncio.create_task(client.post("/generate", json=turn(FIRST, "a")))
        await server.until(lambda: server.states() == ["decode"])
        assert await refusal(client, turn([1, 2, 3], "a", replace=True)) == "request_id 'a' is already live"
        assert await refusal(client, turn([7], "b", "a")) == "Session request is appending to a request that hasn't finished."
        await client.post("/abort_request", json={"rid": "a"})
        assert (await running).status_code == 200
        server.server.engine.check_integrity()
        follow = asyncio.create_task(
            client.post("/generate", json=turn([7], "b", "a", drop_previous_output=True, max_new_tokens=1))
        )
        assert (await follow).json()["meta_info"]["prompt_tokens"] == len(FIRST) + 1


@pytest.mark.parametrize(
    "asked",
    [
        b'{"capacity_of_str_len": 1, "timeout": 1e999}',
        b'{"capacity_of_str_len": 1, "timeout": NaN}',
        b'{"capacity_of_str_len": 1, "timeout": -1}',
        b'{"capacity_of_str_len": 1, "timeout": 1%b}' % (b"0" * 400),
        b'{"capacity_of_str_len": 1, "session_id": "%b"}' % (b"s" * 1025),
    ],
    ids=["infinite", "nan", "negative", "huge", "long"],
)
async def test_what_cannot_open_a_session(asked: bytes) -> None:
    async with talking() as (_server, client):
        answer = await client.post("/open_session", content=asked)
        assert answer.status_code == 400 and ("timeout must be" in answer.text or "session_id must be" in answer.text)


async def test_more_sessions_than_the_limit_are_told_so() -> None:
    async with talking(limits__stored_responses=1) as (_server, client):
        await opened(client)
        second = await client.post("/open_session", json={"capacity_of_str_len": 1})
        assert second.status_code == 400 and "1 are open" in second.json()["error"]["message"]
        await client.post("/close_session", json={"session_id": "s"})
        await opened(client)


async def test_an_id_too_long_for_a_session() -> None:
    async with talking() as (_server, client):
        await opened(client)
        assert await refusal(client, turn(FIRST, "x" * 1025)) == "rid has 1025 characters: at most 1024 in a session"
