"""P/D with real bytes: NIXL agents in this process and in two, checked on arrival. Skipped where NIXL is not installed."""

import asyncio
import os
import signal
from dataclasses import replace

import httpx
import numpy as np
import pytest
from tests.core.sglang.driving import make_engine, outputs, request, run
from tests.serve.sglang.pair import live_pair, until
from tests.serve.sglang.test_pd_processes import PROMPT, Running, running, unified_answer

from windtunnel.core.transfer.backends import Fate
from windtunnel.serve.config import ServeConfig, UsageError
from windtunnel.serve.nixl import library
from windtunnel.serve.sglang.flags import check_sglang
from windtunnel.serve.sglang.settings import DisaggSettings

REAL = ["--disaggregation-transfer-backend", "nixl", "--nixl-block-bytes", "128"]
NIXL = DisaggSettings(transfer_backend="nixl")
needs_nixl = pytest.mark.skipif(not library.installed(), reason="NIXL is not installed: pip install --no-deps nixl nixl-cu12")


@needs_nixl
async def test_a_pair_answers_as_a_unified_engine_does_and_the_bytes_are_there() -> None:
    async with live_pair(NIXL) as pair:
        for number in range(5):
            pair.submit(f"r{number}", 100 + number, prompt=150, tokens=6)
        await until(lambda: all(pair.decode.ended(f"r{n}") and pair.prefill.ended(f"r{n}") for n in range(5)))
        unified = make_engine()
        unified.submit([request("r0", 150, 6)], 0)
        want = [token for output in outputs(run(unified), "r0") for token in output.token_ids]
        assert len(want) == 6
        for number in range(5):
            assert pair.decode.tokens(f"r{number}") == want
            assert pair.prefill.ending(f"r{number}")[:2] == ("length", 200)
        await until(pair.empty)
        (sent,), (got,) = (side.pd.debug()["real_bytes"] for side in (pair.prefill, pair.decode))
        assert sent["bytes"] == 5 * 38 * 64 and sent["open"] == 0
        assert got["corrupt_blocks"] == got["malformed_messages"] == sent["malformed_messages"] == 0
        assert np.count_nonzero(pair.decode.pd.kv_agents[0].memory.sink.any(axis=1)) >= 38


@needs_nixl
async def test_unequal_ranks_gather_and_share() -> None:
    for tp in ((2, 1), (1, 2)):
        async with live_pair(NIXL, tp=tp) as pair:
            pair.submit("r", 5)
            await until(lambda pair=pair: pair.decode.ended("r"))  # type: ignore[misc]
            assert pair.decode.ending("r")[:2] == ("length", 200)
            await until(pair.empty)
            assert [one["moves"] for one in pair.prefill.pd.debug()["real_bytes"]] == [2 * tp[1]] * tp[0]


@needs_nixl
async def test_bytes_that_are_not_those_that_were_sent_fail_the_transfer() -> None:
    """The source of the prefill is overwritten: both legs end with 500, whatever the release tells the other side."""
    for release in ("0.5.23", "0.5.12"):
        async with live_pair(replace(NIXL, profile=release)) as pair:
            pair.prefill.pd.kv_agents[0].memory.source[:] ^= 1
            pair.submit("r", 5)
            await until(lambda pair=pair: pair.decode.ended("r") and pair.prefill.ended("r"))  # type: ignore[misc]
            _, status, message = pair.decode.ending("r")
            assert status == 500 and "are not those that were sent" in message
            assert pair.prefill.ending("r")[1] == 500
            assert pair.decode.pd.debug()["real_bytes"][0]["corrupt_blocks"] > 0
            await until(pair.empty)


@needs_nixl
async def test_an_abort_in_the_middle_of_a_transfer_ends_both_legs() -> None:
    """The first chunk's bytes have arrived, the second chunk is stalled in the model: nothing more is written."""
    async with live_pair(NIXL) as pair:
        backend = pair.prefill.worker.ranks[0].backend  # type: ignore[union-attr]
        backend.modelled.fate = lambda write: Fate("stall" if write.chunk.chunk else "ok")
        pair.submit("r", 5, prompt=150)
        await until(lambda: pair.prefill.pd.kv_agents[0].moves == 1)
        pair.decode.driver.abort(["r"], notify=True)
        await until(lambda: pair.decode.ended("r") and pair.prefill.ended("r"))
        assert [side.ending("r")[1] for side in (pair.prefill, pair.decode)] == [500, 500]
        assert pair.prefill.pd.kv_agents[0].moves == 1


@needs_nixl
async def test_a_decode_without_real_memory_fails_the_transfer() -> None:
    async with live_pair(NIXL, transfer_backend="sim") as pair:
        pair.submit("r", 5)
        await until(lambda: pair.decode.ended("r") and pair.prefill.ended("r"))
        assert [side.ending("r")[1] for side in (pair.prefill, pair.decode)] == [500, 500]


@needs_nixl
async def test_the_text_of_two_processes_is_the_unified_servers() -> None:
    body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
    async with running(everybody=REAL) as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=body)).json()
        await pd.until_empty()
        (sent,) = (await pd.debug("prefill"))["real_bytes"]
        (got,) = (await pd.debug("decode"))["real_bytes"]
    unified = await unified_answer(body)
    assert answer["choices"] == unified["choices"] and answer["usage"] == unified["usage"]
    assert sent["bytes"] > 0 and sent["bytes"] % 128 == 0 and got["corrupt_blocks"] == 0


@needs_nixl
async def test_a_decode_killed_with_bytes_on_their_way_fails_the_request_at_once() -> None:
    """It is stopped first, so that the write has no receipt. The 600 s of the model do not count for real bytes."""
    async with running(everybody=REAL, prefill=["--pacing", "step", "--step-base", "1s", "--transfer-dead-peer", "600s"]) as pd:
        legs = _legs(pd)
        await pd.until(lambda: pd.queue("decode", "transfer"))
        os.kill(pd.pid("decode"), signal.SIGSTOP)

        async def on_their_way() -> bool:
            return bool((await pd.debug("prefill"))["real_bytes"][0]["open"])

        await pd.until(on_their_way)
        os.kill(pd.pid("decode"), signal.SIGKILL)
        answers = await asyncio.gather(*legs, return_exceptions=True)
        assert isinstance(answers[0], httpx.Response) and answers[0].status_code == 500
        assert "Prefill transfer failed" in answers[0].text
        assert not any((await pd.debug("prefill"))["outstanding"].values())


@needs_nixl
async def test_a_killed_prefill_is_lost_after_two_heartbeats() -> None:
    async with running(everybody=[*REAL, "--time-scale", "10"], prefill=["--pacing", "step", "--step-base", "600s"]) as pd:
        legs = _legs(pd)
        await pd.until(lambda: pd.queue("decode", "transfer"))
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        answers = await asyncio.gather(*legs, return_exceptions=True)
        assert isinstance(answers[1], httpx.Response) and answers[1].status_code == 500
        assert "Lost connection with prefill instance" in answers[1].text
        assert not any((await pd.debug("decode"))["outstanding"].values())


def _legs(pd: Running) -> list[asyncio.Future[httpx.Response]]:
    """Prefill's and decode's, without a router."""
    port = pd.up.ports.bootstrap["prefill"]
    body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12, "bootstrap_host": "127.0.0.1"}
    told = {**body, "bootstrap_port": port, "bootstrap_room": 77}
    urls = [f"{pd.up.servers[name]}/v1/completions" for name in ("prefill", "decode")]
    return [asyncio.ensure_future(pd.client.post(url, json=told)) for url in urls]


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: False)
    config = replace(ServeConfig(model="windtunnel"), disagg=replace(NIXL, mode="prefill"))
    with pytest.raises(UsageError, match=r"--disaggregation-transfer-backend nixl .*pip install --no-deps nixl nixl-cu12"):
        check_sglang(config)
    with pytest.raises(ValueError, match="pip install --no-deps nixl nixl-cu12"):
        library.load()
