"""A client that leaves is gone: phase x mechanism x streaming x family, on real sockets."""

import logging

import pytest
from tests.serve.live import FOREVER_NS, LiveServer, RawClient, live, request_bytes

PHASES = {
    "queued": {"scheduler__max_num_seqs": 1, "pacing__ttft_ns": FOREVER_NS},
    "prefill": {"pacing__ttft_ns": FOREVER_NS},
    "decode": {"pacing__itl_ns": FOREVER_NS},
}
BODIES = {
    "/v1/completions": {"model": "wt-model", "prompt": "storm [wt:7]", "max_tokens": 50, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "wt-model",
        "messages": [{"role": "user", "content": "storm [wt:7]"}],
        "max_tokens": 50,
        "ignore_eos": True,
    },
    "/v1/responses": {"model": "wt-model", "input": "storm [wt:7]", "max_output_tokens": 50, "ignore_eos": True},
    "/v1/messages": {"model": "wt-model", "messages": [{"role": "user", "content": "storm [wt:7]"}], "max_tokens": 50},
}


async def occupy(server: LiveServer) -> RawClient:
    """Fill the only slot, so that the next request queues."""
    client = await RawClient.connect(server.port)
    client.send(request_bytes("/v1/completions", BODIES["/v1/completions"] | {"stream": True}))
    await server.until(lambda: server.states() == ["prefill"])
    return client


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("mechanism", ["fin", "rst", "half_close"])
@pytest.mark.parametrize("phase", PHASES)
async def test_resources_are_free_within_one_step(
    phase: str, mechanism: str, stream: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with live(**PHASES[phase]) as server:
        before = [await occupy(server)] if phase == "queued" else []
        quiet = server.states()
        client = await RawClient.connect(server.port)
        client.send(request_bytes(path, BODIES[path] | {"stream": stream}))
        await server.until(lambda: server.states() == [*quiet, phase])
        await server.until(lambda: server.published() == len(quiet) + 1)
        usage_before_close = server.gauge("vllm:kv_cache_usage_perc")
        steps = server.server.driver.steps
        with caplog.at_level(logging.INFO, "windtunnel.serve"):
            client.leave(mechanism)
            await server.until(lambda: server.states() == quiet)
            await server.until(lambda: server.server.driver.steps > steps)
        assert server.server.driver.steps == steps + 1
        assert server.gauge("vllm:num_requests_running") == len(before)
        assert server.gauge("vllm:num_requests_waiting") == 0
        assert server.gauge("vllm:kv_cache_usage_perc") == (usage_before_close if before else 0)
        assert server.gauge("vllm:request_success_total") == 0
        assert [record.message for record in caplog.records].count(record_of_departure(caplog)) == 1
        await server.until(lambda: len(server.server.jobs) == len(before))
        server.server.engine.check_integrity()


def record_of_departure(caplog: pytest.LogCaptureFixture) -> str:
    lines = [record.message for record in caplog.records if "has gone" in record.message]
    assert len(lines) == 1, lines
    return lines[0]


async def test_a_body_whose_last_piece_is_large_does_not_hide_the_departure() -> None:
    """uvicorn stops reading after 64 KiB that nobody has fetched, and a client's end is something to read."""
    async with live(**PHASES["decode"]) as server:
        client = await RawClient.connect(server.port)
        request = request_bytes("/v1/completions", BODIES["/v1/completions"] | {"user": "x" * 100_000})
        head, _, body = request.partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        await server.until(lambda: any(one.cycle is not None for one in server.process.server_state.connections))
        (connection,) = server.process.server_state.connections
        await server.until(lambda: connection.cycle.message_event._waiter is not None)
        connection.data_received(body)
        await server.until(lambda: server.states() == ["decode"])
        client.leave("fin")
        await server.until(lambda: server.states() == [])


async def test_a_pipelined_request_does_not_hide_the_departure() -> None:
    async with live(**PHASES["decode"]) as server:
        client = await RawClient.connect(server.port)
        body = BODIES["/v1/completions"] | {"stream": True}
        client.send(request_bytes("/v1/completions", body) + request_bytes("/v1/completions", body))
        await server.until(lambda: server.states() == ["decode"])
        client.leave("fin")
        await server.until(lambda: server.states() == [])
        await server.until(lambda: len(server.server.jobs) == 0)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with live() as server:
        client = await RawClient.connect(server.port)
        first = request_bytes("/v1/completions", BODIES["/v1/completions"] | {"max_tokens": 3, "stream": True})
        second = b"GET /version HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
        client.send(first + second)
        answer = await client.read_all()
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.index(b"[DONE]") < answer.index(b'"version"')
