"""The driver: the audit of an idle engine, and an answer that breaks."""

import logging
import re

import pytest
from tests.serve.live import FOREVER_NS, RawClient, live, request_bytes

from windtunnel.serve import driver as driver_module
from windtunnel.serve import http11
from windtunnel.serve.streams import StreamedAnswer

BODY = {"model": "wt-model", "prompt": "audit [wt:1]", "max_tokens": 3, "ignore_eos": True}


async def test_an_idle_engine_is_audited(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(driver_module, "_IDLE_S", 0.0)
    async with live() as server:
        audits = 0

        def leak() -> None:
            nonlocal audits
            audits += 1
            raise AssertionError("block 7 has two owners")

        monkeypatch.setattr(server.server.engine, "check_integrity", leak)
        client = await RawClient.connect(server.port)
        with caplog.at_level(logging.CRITICAL, "windtunnel.serve"):
            client.send(request_bytes("/v1/completions", BODY, extra="Connection: close\r\n"))
            await client.read_all()
            await server.until(lambda: audits > 0)
        assert "block 7 has two owners" in caplog.text


async def test_a_broken_answer_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server:
        bystander = await RawClient.connect(server.port)
        bystander.send(request_bytes("/v1/completions", BODY | {"stream": True}))
        await bystander.read_until(b"data: {")
        monkeypatch.setattr(StreamedAnswer, "_emit", _breaks)
        victim = await RawClient.connect(server.port)
        victim.send(request_bytes("/v1/completions", BODY | {"stream": True}, extra="Connection: close\r\n"))
        answer = await victim.read_all()
        assert b'"code": 500' in answer or b'"code":500' in answer
        await server.until(lambda: server.states() == ["decode"])
        monkeypatch.undo()
        bystander.leave("fin")
        await server.until(lambda: not server.server.jobs)
        server.server.engine.check_integrity()


async def test_time_counts_from_the_arrival_of_the_request_at_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(pacing__ttft_ns=FOREVER_NS) as server:
        arrived_ns = driver_module.now_ns()
        monkeypatch.setattr(http11, "now_ns", lambda: arrived_ns)
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY | {"stream": True}))
        await server.until(lambda: server.states() == ["prefill"])
        assert [view.arrival_ns for view in server.server.engine.live()] == [arrived_ns]
        assert server.server.engine.next_event_at() == arrived_ns + FOREVER_NS
        client.leave("fin")


async def test_a_pipelined_request_arrives_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(pacing__ttft_ns=FOREVER_NS) as server:
        arrived_ns = driver_module.now_ns()
        monkeypatch.setattr(http11, "now_ns", lambda: arrived_ns)
        client = await RawClient.connect(server.port)
        first = b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n"
        client.send(first + request_bytes("/v1/completions", BODY | {"stream": True}))
        await server.until(lambda: server.states() == ["prefill"])
        assert server.server.engine.live()[0].arrival_ns > arrived_ns
        client.leave("fin")


async def test_a_pipelined_body_that_comes_after_its_turn_arrives_with_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head waited behind another request, the body did not."""
    async with live(pacing__ttft_ns=FOREVER_NS) as server:
        arrived_ns = driver_module.now_ns() + FOREVER_NS
        monkeypatch.setattr(http11, "now_ns", lambda: arrived_ns)
        client = await RawClient.connect(server.port)
        request = request_bytes("/v1/completions", BODY | {"stream": True})
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n" + request[:-1])
        await client.head()
        client.send(request[-1:])
        await server.until(lambda: server.states() != [])
        assert server.server.engine.live()[0].arrival_ns == arrived_ns
        client.leave("fin")


def _breaks(*_args: object) -> None:
    raise RuntimeError("planted in the test")


async def test_lane_and_straight_path_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODY | {"max_tokens": 40, "stream": True, "prompt": "lane [wt:2]"}
    chat = {"model": "wt-model", "messages": [{"role": "user", "content": "lane [wt:2]"}], "max_tokens": 40, "stream": True}
    answers: dict[str, list[bytes]] = {}
    for lane in ("on", "off"):
        async with live() as server:
            if lane == "off":
                monkeypatch.setattr(StreamedAnswer, "lane", lambda _answer, _choice: None)
            for path, one in (("/v1/completions", body), ("/v1/chat/completions", chat)):
                client = await RawClient.connect(server.port)
                client.send(request_bytes(path, one, extra="Connection: close\r\n"))
                answers.setdefault(path, []).append(_frames(await client.read_all()))
    for first, second in answers.values():
        assert first == second and first.count(b"data: ") > 40


def _frames(answer: bytes) -> bytes:
    """The chunked body without what differs from call to call."""
    body = answer.partition(b"\r\n\r\n")[2]
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb"(chatcmpl|cmpl)-[0-9a-f]{16}", b"id", body))


async def test_prompts_times_n_has_a_limit_of_its_own() -> None:
    async with live(limits__choices=8) as server:
        client = await RawClient.connect(server.port)
        body = {"model": "wt-model", "prompt": ["a", "b", "c"], "n": 3, "temperature": 1, "max_tokens": 1}
        client.send(request_bytes("/v1/completions", body, extra="Connection: close\r\n"))
        answer = await client.read_all()
        assert answer.startswith(b"HTTP/1.1 400") and b"9 choices: at most 8" in answer
        assert server.states() == []
