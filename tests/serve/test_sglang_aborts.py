"""`/abort_request` and what each queue makes of it, for a unified worker (SGLang reference §5, §7.3, §7.4)."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from tests.serve.sglang_live import BODIES, NEVER_NS, PHASES, abort_of, events, sample, talking

MESSAGES = {"queued": "Abort in waiting queue", "prefill": "Aborted", "decode": "Aborted"}
RID = {"rid": "job-1"}
Call = Coroutine[Any, Any, httpx.Response]
_HELD: "set[asyncio.Task[httpx.Response]]" = set()


def started(call: Call) -> "asyncio.Task[httpx.Response]":
    """A request in the background. Some only occupy a slot, and nobody asks how they ended when the server went."""
    task = asyncio.ensure_future(call)
    _HELD.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: "asyncio.Task[httpx.Response]") -> None:
    _HELD.discard(task)
    if not task.cancelled():
        task.exception()


async def begun(server: Any, client: httpx.AsyncClient, phase: str, path: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
    """A request that stays in this phase."""
    if phase == "queued":
        started(client.post("/generate", json=BODIES["/generate"]))
        await server.until(lambda: server.states() == ["prefill"])
    quiet = server.states()
    task = started(client.post(path, json=BODIES[path] | RID | fields))
    await server.until(lambda: server.states() == [*quiet, phase])
    return task


@pytest.mark.parametrize("phase", MESSAGES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_native_request_ends_with_200_and_an_abort_object(phase: str, stream: bool) -> None:
    async with talking(**PHASES[phase]) as (server, client):
        task = await begun(server, client, phase, "/generate", stream=stream)
        answer = await client.post("/abort_request", json={"rid": "job"})
        assert (answer.status_code, answer.content) == (200, b"")
        response = await task
        assert response.status_code == 200
        body = events(response.text)[-2] if stream else response.json()
        finish = abort_of(body)
        assert (finish["type"], finish["message"], finish["status_code"]) == ("abort", MESSAGES[phase], None)
        assert body["meta_info"]["completion_tokens"] == (1 if phase == "decode" else 0)
        assert sample(server, "num_aborted_requests_total") == 1
        server.server.engine.check_integrity()


@pytest.mark.parametrize("phase", MESSAGES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_openai_request_ends_with_finish_reason_abort(path: str, stream: bool, phase: str) -> None:
    async with talking(**PHASES[phase]) as (server, client):
        task = await begun(server, client, phase, path, stream=stream)
        await client.post("/abort_request", json=RID)
        response = await task
        assert response.status_code == 200
        body = events(response.text)[-2] if stream else response.json()
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["choices"][0]["matched_stop"] is None


@pytest.mark.parametrize("asked", [{"rid": "other"}, {"rid": ""}, {}, {"rid": "job-11"}])
async def test_what_does_not_match_goes_on(asked: dict[str, Any]) -> None:
    """An empty `rid` matches nothing (P27); ids match by prefix, not the other way round."""
    async with talking(**PHASES["decode"]) as (server, client):
        await begun(server, client, "decode", "/generate")
        assert (await client.post("/abort_request", json=asked)).status_code == 200
        assert server.states() == ["decode"]
        assert sample(server, "num_aborted_requests_total") == 0


async def test_one_prefix_ends_a_whole_batch() -> None:
    async with talking(**PHASES["decode"]) as (server, client):
        batch = {"text": ["a", "b", "c"], "rid": "batch", "sampling_params": {"max_new_tokens": 9}}
        task = asyncio.ensure_future(client.post("/generate", json=batch))
        await server.until(lambda: server.states() == ["decode"] * 3)
        assert [view.request_id for view in server.server.engine.live()] == ["batch_0", "batch_1", "batch_2"]
        await client.post("/abort_request", json={"rid": "batch"})
        assert [abort_of(item)["type"] for item in (await task).json()] == ["abort"] * 3


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_full_queue(path: str, stream: bool) -> None:
    """A whole answer is a 503. In a stream the abort with a status code is an event under 200 (§7.4)."""
    async with talking(**PHASES["queued"], sglang__max_queued_requests=1) as (server, client):
        await begun(server, client, "queued", "/generate")
        response = await client.post(path, json=BODIES[path] | {"stream": stream})
        if not stream:
            assert response.status_code == 503
            told = response.json()
            assert (told["object"], told["message"], told["code"]) == ("error", "The request queue is full.", 503)
            assert told["type"] == ("503" if path == "/generate" else "ServiceUnavailable")
            return
        assert response.status_code == 200
        last, done = events(response.text)
        assert done == "[DONE]"
        if path == "/generate":
            assert abort_of(last)["status_code"] == 503
        else:
            assert last["error"]["type"] == "SERVICE_UNAVAILABLE"


async def test_the_waiting_timeout_is_a_503() -> None:
    """The first request must not wait itself, so the limit comes after it."""
    async with talking(**PHASES["queued"], pacing__time_scale=100.0) as (server, client):
        started(client.post("/generate", json=BODIES["/generate"]))
        await server.until(lambda: server.states() == ["prefill"])
        server.server.reconfigure({"req_waiting_timeout": 1})
        response = await client.post("/v1/completions", json=BODIES["/v1/completions"])
        assert (response.status_code, response.json()["message"]) == (503, "Request waiting timeout reached.")


async def test_the_running_timeout_inside_a_stream_is_an_error_event_then_usage_then_done() -> None:
    settings = {"sglang__req_running_timeout_ns": 10**9, "pacing__time_scale": 100.0, "pacing__itl_ns": NEVER_NS}
    async with talking(**settings) as (_server, client):
        body = BODIES["/v1/chat/completions"] | {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        *_before, error, usage, done = events(response.text)
        assert error["error"] == {
            "object": "error",
            "message": "Request running timeout reached.",
            "type": "SERVICE_UNAVAILABLE",
            "param": None,
            "code": 503,
        }
        assert usage["usage"]["completion_tokens"] == 1
        assert done == "[DONE]"
        assert not any(choice["finish_reason"] for event in _before for choice in event["choices"])


async def test_a_live_rid_cannot_be_used_twice() -> None:
    async with talking(**PHASES["decode"]) as (server, client):
        await begun(server, client, "decode", "/generate")
        response = await client.post("/generate", json=BODIES["/generate"] | RID)
        assert response.status_code == 400
        assert "job-1" in response.json()["error"]["message"]


async def test_pause_by_abort_ends_everything_and_continue_takes_requests_again() -> None:
    async with talking(**PHASES["decode"]) as (server, client):
        task = await begun(server, client, "decode", "/generate")
        assert (await client.post("/pause_generation", json={"mode": "abort"})).status_code == 200
        assert abort_of((await task).json())["type"] == "abort"
        waiting = asyncio.ensure_future(client.post("/generate", json=BODIES["/generate"] | {"stream": True}))
        await server.until(lambda: server.states() == ["queued"])
        await client.post("/continue_generation", json={})
        await server.until(lambda: server.states() == ["decode"])
        waiting.cancel()


async def test_flush_is_refused_while_anything_is_live() -> None:
    async with talking(**PHASES["decode"]) as (server, client):
        await begun(server, client, "decode", "/generate")
        assert (await client.post("/flush_cache")).status_code == 400
        await client.post("/abort_request", json={"abort_all": True})
        await server.until(lambda: server.states() == [])
        assert (await client.get("/flush_cache")).status_code == 200
        assert server.server.engine.loads()["num_used_tokens"] == 0
