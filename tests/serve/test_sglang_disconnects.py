"""When an SGLang server notices that a client has left (SGLang reference §5): phase x family x streaming x mechanism."""

import asyncio
import logging

import httpx
import pytest
from tests.serve.live import PATIENCE_S, LiveServer, RawClient, request_bytes
from tests.serve.sglang_live import BODIES, NEVER_NS, PHASES, sample, sglang, talking

DECODING = {"pacing__itl_ns": NEVER_NS}


def at_once(path: str, stream: bool, phase: str) -> bool:
    """A native stream from the start, others once they have begun; everything else as the handler wakes."""
    return stream and (path == "/generate" or phase == "decode")


async def occupied(server: LiveServer, phase: str) -> list[RawClient]:
    if phase != "queued":
        return []
    client = await RawClient.connect(server.port)
    client.send(request_bytes("/generate", BODIES["/generate"] | {"stream": True}))
    await server.until(lambda: server.states() == ["prefill"])
    return [client]


async def left(server: LiveServer, path: str, phase: str, mechanism: str, *, stream: bool) -> None:
    """Send a request, wait for the phase, leave, and let the server see it: another call passes through its loop meanwhile."""
    client = await RawClient.connect(server.port)
    quiet = server.states()
    client.send(request_bytes(path, BODIES[path] | {"stream": stream}))
    await server.until(lambda: server.states() == [*quiet, phase])
    if at_once(path, stream, phase):
        await client.head()
    client.leave(mechanism)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as other:
        for _ in range(3):
            assert (await other.get(f"{server.url}/v1/models")).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("mechanism", ["fin", "rst"])
@pytest.mark.parametrize("phase", PHASES)
async def test_who_notices_at_once(phase: str, mechanism: str, stream: bool, path: str) -> None:
    async with sglang(**PHASES[phase], sglang__request_state_wait_ns=NEVER_NS) as server:
        before = await occupied(server, phase)
        quiet = server.states()
        await left(server, path, phase, mechanism, stream=stream)
        if at_once(path, stream, phase):
            await server.until(lambda: server.states() == quiet)
            assert sample(server, "num_aborted_requests_total") == 1
        else:
            assert server.states() == [*quiet, phase]
            assert sample(server, "num_aborted_requests_total") == 0
        assert len(before) == len(quiet)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_the_others_notice_as_their_wait_times_out(
    phase: str, stream: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The real 4 s, divided by `--time-scale`."""
    async with sglang(**PHASES[phase], pacing__time_scale=200.0) as server:
        before = await occupied(server, phase)
        quiet = server.states()
        assert len(before) == len(quiet)
        with caplog.at_level(logging.INFO, "windtunnel.serve"):
            await left(server, path, phase, "fin", stream=stream)
            await server.until(lambda: server.states() == quiet)
        assert sum("has gone" in record.message for record in caplog.records) == 1
        await server.until(lambda: len(server.server.jobs) == len(quiet))
        server.server.engine.check_integrity()


async def test_a_whole_answer_notices_with_the_next_output() -> None:
    """While tokens flow the check is made at each wake-up, long before any time-out (§5)."""
    async with sglang(pacing__itl_ns=20_000_000, sglang__request_state_wait_ns=NEVER_NS) as server:
        client = await RawClient.connect(server.port)
        sampling = {"sampling_params": {"max_new_tokens": 10_000, "ignore_eos": True}}
        client.send(request_bytes("/generate", BODIES["/generate"] | sampling))
        await server.until(lambda: server.states() == ["decode"])
        client.leave("fin")
        await server.until(lambda: server.states() == [])
        assert sample(server, "num_aborted_requests_total") == 1


@pytest.mark.parametrize(("release", "ends"), [("0.5.15", True), ("0.5.18", False), ("0.5.20", True)])
async def test_what_a_release_does_about_a_broken_stream(release: str, ends: bool) -> None:
    """Before 0.5.17 after 2 s (scaled), 0.5.17 to 0.5.19 never (P41), then at once."""
    settings = {"pacing__itl_ns": NEVER_NS, "pacing__time_scale": 100.0, "sglang__profile": release}
    async with sglang(**settings) as server:
        await left(server, "/generate", "decode", "fin", stream=True)
        await server.until(lambda: len(server.server.jobs) == 0)
        if ends:
            await server.until(lambda: server.states() == [])
        else:
            await asyncio.sleep(0)
            assert server.states() == ["decode"]
            assert sample(server, "num_aborted_requests_total") == 0


async def test_the_zombie_of_0_5_18_decodes_to_its_end_and_an_abort_by_id_reaches_it() -> None:
    async with talking(**DECODING, sglang__profile="0.5.18") as (server, client):
        await left(server, "/generate", "decode", "fin", stream=True)
        await server.until(lambda: len(server.server.jobs) == 0)
        assert server.states() == ["decode"]
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        await server.until(lambda: server.states() == [])
