"""Mooncake between processes: what each side notices when the other one is killed. The legs are sent by the test."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serve.sglang.test_pd_processes import PROMPT, Running, unified_answer
from tests.serve.vllm_pd.test_processes import held_or_expired, running

from windtunnel.serve.up.plan import Ports, UpError, preset
from windtunnel.serve.up.processes import router_command

BODY = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
TRANSFER = "xfer-1"
TO_P = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": TRANSFER}


async def _to_d(pd: Running) -> dict[str, Any]:
    bootstrap = (await pd.debug("prefill"))["transport"]["bootstrap"]
    engine_id = (await pd.client.get(f"{bootstrap}/query")).json()["0"]["engine_id"]
    told = {"transfer_id": TRANSFER, "remote_bootstrap_addr": bootstrap, "remote_engine_id": engine_id}
    return {"do_remote_decode": False, "do_remote_prefill": True, **told}


async def _prefill(pd: Running) -> None:
    body = BODY | {"max_tokens": 1, "kv_transfer_params": TO_P}
    assert (await pd.client.post(f"{pd.up.servers['prefill']}/v1/completions", json=body)).status_code == 200


async def _decoding(pd: Running) -> "asyncio.Task[httpx.Response]":
    """Its pull has reached the prefill."""
    body = BODY | {"kv_transfer_params": await _to_d(pd)}
    asking = asyncio.ensure_future(pd.client.post(f"{pd.up.servers['decode']}/v1/completions", json=body))

    async def pulling() -> bool:
        return bool((await pd.debug("prefill"))["outstanding"]["pulls"])

    await pd.until(pulling)
    return asking


async def _counters(pd: Running, name: str) -> dict[str, int]:
    (counted,) = (await pd.debug(name))["counters"]
    return {key.removeprefix("mooncake_num_"): value for key, value in counted.items() if value}


async def test_the_text_is_the_single_servers() -> None:
    """With legs sent one by one, the decode's first, and by our own balancer, which one command starts, too."""
    async with running(what="vllm-pd-mooncake") as pd:
        asking = await _decoding(pd)
        await _prefill(pd)
        by_hand = (await asking).json()
        await pd.until_empty()
        balanced = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        stream = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY | {"stream": True})).text
        await pd.until_empty()
        assert await _counters(pd, "prefill") == await _counters(pd, "decode") == {}
    wanted = (await unified_answer(BODY, "vllm"))["choices"][0]["text"]
    assert by_hand["choices"][0]["text"] == balanced["choices"][0]["text"] == wanted
    assert stream.rstrip().endswith("data: [DONE]")


async def test_a_killed_decode_is_noticed_by_the_write_and_the_blocks_stay_until_their_time_is_over() -> None:
    """The time-out of 480 s is 4.8 s here."""
    slow = ["--transfer-latency", "600s"]
    async with running("none", "vllm-pd-mooncake", everybody=["--time-scale", "100"], prefill=slow) as pd:
        await _prefill(pd)
        asking = await _decoding(pd)
        os.kill(pd.pid("decode"), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await asking

        async def failed() -> bool:
            return (await _counters(pd, "prefill")).get("failed_transfers") == 1

        await pd.until(failed)
        assert held_or_expired(await pd.debug("prefill"), "mooncake")

        async def freed() -> bool:
            return not any((await pd.debug("prefill"))["outstanding"].values())

        await pd.until(freed)
        assert await _counters(pd, "prefill") == {"failed_transfers": 1, "kv_expired_reqs": 1}


async def test_a_killed_prefill_is_not_noticed_before_the_decode_s_patience_is_over() -> None:
    """The 480 s and a minute are 2.7 s here."""
    async with running("none", "vllm-pd-mooncake", everybody=["--time-scale", "200"]) as pd:
        asking = await _decoding(pd)
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        assert (await asking).status_code == 500
        assert await _counters(pd, "decode") == {"failed_recvs": 1}
        assert not any((await pd.debug("decode"))["outstanding"].values())


def test_a_router_that_does_not_speak_mooncake_is_refused() -> None:
    plan = replace(preset("vllm-pd-mooncake"), router="sglang-router")
    with pytest.raises(
        UpError, match="sglang-router does not pair vllm-mooncake workers; those that do: smg, vllm-router, windt"
    ):
        router_command(plan, {}, Ports({}), 1)
