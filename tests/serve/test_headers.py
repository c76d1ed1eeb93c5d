"""Request and response headers (vLLM reference §1.6)."""

import asyncio
import json
from typing import Any

import pytest
from tests.own_time import own_time
from tests.serve.golden import split
from tests.serve.live import FOREVER_NS, LiveServer, RawClient, live, request_bytes
from tests.serve.test_operations import BODY

CHAT = {"model": "wt-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}


async def post(server: LiveServer, path: str, body: dict[str, Any], extra: str = "") -> tuple[int, dict[str, str], bytes]:
    client = await RawClient.connect(server.port)
    client.send(request_bytes(path, body, extra=f"{extra}Connection: close\r\n"))
    status, headers, answer = split(await client.read_all())
    return status, dict(headers), answer


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_orca_report_in_both_formats(path: str, body: dict[str, Any]) -> None:
    async with live() as server:
        _, headers, _ = await post(server, path, body, "endpoint-load-metrics-format: TEXT\r\n")
        assert (
            headers["endpoint-load-metrics"]
            == "TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"
        )
        assert list(headers).index("endpoint-load-metrics") < list(headers).index("content-length")
        _, headers, _ = await post(server, path, body, "endpoint-load-metrics-format: json\r\n")
        assert headers["endpoint-load-metrics"].startswith("JSON ")
        assert set(json.loads(headers["endpoint-load-metrics"][5:])["named_metrics"]) == {
            "kv_cache_usage_perc",
            "num_requests_waiting",
        }


@pytest.mark.parametrize("extra", ["", "endpoint-load-metrics-format: XML\r\n", "endpoint-load-metrics-format: \r\n"])
async def test_no_orca_report_unless_asked_for(extra: str) -> None:
    async with live() as server:
        assert "endpoint-load-metrics" not in (await post(server, "/v1/completions", BODY, extra))[1]


async def test_no_orca_report_with_a_stream() -> None:
    async with live() as server:
        _, headers, _ = await post(server, "/v1/completions", BODY | {"stream": True}, "endpoint-load-metrics-format: TEXT\r\n")
        assert "endpoint-load-metrics" not in headers


async def test_priority_header_beats_the_body() -> None:
    options = {"scheduler__scheduling_policy": "priority", "scheduler__max_num_seqs": 1, "pacing__ttft_ns": FOREVER_NS}
    async with live(**options) as server:
        clients = []
        for request_id, priority in (("first", 0), ("late", 9), ("early", -9)):
            client = await RawClient.connect(server.port)
            extra = f"X-Request-Id: {request_id}\r\nX-Vllm-Priority: {priority}\r\n"
            client.send(request_bytes("/v1/completions", BODY | {"priority": 0}, extra=extra))
            clients.append(client)
            await server.until(lambda: len(server.states()) == len(clients))
        order = [view.tags["external_id"] for view in server.server.engine.live()]
        assert order[-2:] == ["cmpl-early-0", "cmpl-late-0"]
        for client in clients:
            client.leave("fin")


async def test_data_parallel_rank_out_of_range_is_refused_at_engine_input() -> None:
    async with live() as server:
        status, _, answer = await post(server, "/v1/completions", BODY, "X-data-parallel-rank: 3\r\n")
        assert status == 400
        assert b"data_parallel_rank 3" in answer
        status, _, answer = await post(server, "/v1/completions", BODY | {"stream": True}, "X-data-parallel-rank: 3\r\n")
        assert status == 200
        assert b"data_parallel_rank 3" in answer


async def test_keep_alive_comments_only_while_a_stream_is_silent() -> None:
    async with live(pacing__itl_ns=FOREVER_NS, sse_keep_alive_interval_ns=1_000_000) as server:
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY | {"stream": True}))
        await client.read_until(b"data: ")
        for _ in range(3):
            await client.read_until(b": keep-alive\n\n")
        client.leave("fin")
    with own_time(asyncio.get_running_loop()):
        async with live(pacing__itl_ns=2_000_000, sse_keep_alive_interval_ns=100_000_000) as server:
            _, _, answer = await post(server, "/v1/completions", BODY | {"stream": True, "max_tokens": 400})
            assert answer.count(b": keep-alive") <= 2
            assert answer.count(b'"text":') == 400


async def test_stream_interval_batches_but_not_the_first_and_the_last() -> None:
    async with live(stream_interval=10) as server:
        _, _, answer = await post(
            server, "/v1/completions", BODY | {"stream": True, "max_tokens": 25, "return_token_ids": True}
        )
        frames = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
        assert [len(frame["choices"][0]["token_ids"]) for frame in frames] == [1, 10, 10, 4]


@pytest.mark.parametrize(
    ("asked", "status", "kind"),
    [("429", 429, "RateLimitError"), ("503", 503, "InternalServerError"), ("x", 400, "BadRequestError")],
)
async def test_x_return_error(asked: str, status: int, kind: str) -> None:
    async with live() as server:
        got, _, answer = await post(server, "/v1/completions", BODY, f"X-Return-Error: {asked}\r\n")
        assert (got, json.loads(answer)["error"]["type"]) == (status, kind)


async def test_injected_failures_by_share_and_kind() -> None:
    async with live(failures__rate_percent=100, failures__types=("rate_limit",)) as server:
        assert (await post(server, "/v1/completions", BODY))[0] == 429
        server.server.reconfigure({"failure_injection_rate": 0})
        assert (await post(server, "/v1/completions", BODY))[0] == 200
        server.server.reconfigure({"failure_injection_rate": 50, "failure_types": ["model_not_found"]})
        statuses = [(await post(server, "/v1/completions", BODY))[0] for _ in range(40)]
        assert set(statuses) == {200, 404}
