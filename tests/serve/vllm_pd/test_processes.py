"""`up vllm-pd`: prefill, decode and balancer as processes of one command, and either side killed."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serve.sglang.test_pd_processes import PATIENCE_S, PROMPT, Running, unified_answer

from windtunnel.serve.nixl import library
from windtunnel.serve.up.plan import Ports, UpError, preset, with_args
from windtunnel.serve.up.processes import Fleet, router_command

BODY = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}


@contextlib.asynccontextmanager
async def running(router: Any = "windtunnel", what: str = "vllm-pd", **args: list[str]) -> AsyncIterator[Running]:
    """`args`: words for one role, or for all with the name `everybody`."""
    plan = replace(preset(what), router=router, liveness_s=0)
    fleet = Fleet(with_args(plan, {key.replace("everybody", ""): value for key, value in args.items()}))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            yield Running(fleet, up, client)
    finally:
        await fleet.stop()


def held_or_expired(part: dict[str, Any], connector: str) -> bool:
    """A machine that stands still may let the time of the blocks pass before anybody looks; nothing else frees them."""
    (counted,) = part["counters"]
    return bool(part["outstanding"]["holds"] == 1 or counted.get(f"{connector}_num_kv_expired_reqs") == 1)


async def _counters(pd: Running, name: str) -> dict[str, int]:
    (counted,) = (await pd.debug(name))["counters"]
    return {key.removeprefix("nixl_num_"): value for key, value in counted.items() if value}


async def test_the_text_is_the_single_servers_and_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.serve.up.processes.TERM_PATIENCE_S", PATIENCE_S)  # a busy machine's processes end later
    async with running() as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        stream = (await pd.client.post(f"{pd.up.url}/v1/completions", json={**BODY, "stream": True})).text
        await pd.until_empty()
        metrics = (await pd.client.get(f"{pd.up.servers['decode']}/metrics")).text
        processes = dict(pd.fleet._processes)
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), "asked to stop"
    single = await unified_answer(BODY, "vllm")
    assert answer["choices"] == single["choices"]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == single["choices"][0]["text"]
    (reads,) = [line for line in metrics.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count{")]
    assert float(reads.split()[-1]) == 2, "the second time only the tail of the prompt that fills no block"


async def test_a_killed_prefill_fails_the_read_and_later_requests() -> None:
    """NIXL reports it within milliseconds; policy `fail` ends the request with 500, and the balancer's own error follows."""
    slow = ["--transfer-latency", "600s"]
    async with running(decode=slow) as pd:
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=BODY))

        async def reading() -> bool:
            return bool((await pd.debug("decode"))["outstanding"]["loads"])

        await pd.until(reading)
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        assert (await asking).status_code == 500
        assert not any((await pd.debug("decode"))["outstanding"].values())
        assert await _counters(pd, "decode") == {"failed_transfers": 1}
        later = await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)
        assert (later.status_code, later.json()["type"]) == (502, "BadGateway")


async def test_a_killed_prefill_may_be_computed_again() -> None:
    policy = ["--transfer-latency", "600s", "--kv-transfer-config.kv_load_failure_policy", "recompute"]
    async with running(decode=policy) as pd:
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=BODY))

        async def reading() -> bool:
            return bool((await pd.debug("decode"))["outstanding"]["loads"])

        await pd.until(reading)
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        answer = await asking
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 12)


async def test_a_killed_decode_leaves_the_prefill_to_its_lease() -> None:
    """No more heartbeats: the lease of 30 s is 3 s here."""
    async with running(everybody=["--time-scale", "10"], decode=["--transfer-latency", "600s"]) as pd:
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=BODY))

        async def reading() -> bool:
            return bool((await pd.debug("decode"))["outstanding"]["loads"])

        await pd.until(reading)
        os.kill(pd.pid("decode"), signal.SIGKILL)
        assert (await asking).status_code == 502
        assert held_or_expired(await pd.debug("prefill"), "nixl")

        async def freed() -> bool:
            return not any((await pd.debug("prefill"))["outstanding"].values())

        await pd.until(freed)
        assert await _counters(pd, "prefill") == {"kv_expired_reqs": 1}


async def test_push_by_the_same_command() -> None:
    async with running(everybody=["--kv-transfer-config.kv_connector", "NixlPushConnector"]) as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        await pd.until_empty()
    assert answer["choices"] == (await unified_answer(BODY, "vllm"))["choices"]


def test_a_pair_that_a_router_does_not_know_is_refused() -> None:
    with pytest.raises(UpError, match="sglang-router does not pair vllm workers; those that do: smg, vllm-router, windtunnel"):
        router_command(replace(preset("vllm-pd"), router="sglang-router"), {}, Ports({}), 1)


# Real bytes

REAL = ["--kv-transfer-backend", "nixl", "--num-gpu-blocks-override", "4096", "--nixl-block-bytes", "128"]
needs_nixl = pytest.mark.skipif(not library.installed(), reason="NIXL is not installed: pip install --no-deps nixl nixl-cu12")


@needs_nixl
@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
async def test_the_text_is_the_single_servers_with_real_bytes(connector: str) -> None:
    async with running(everybody=[*REAL, "--kv-transfer-config.kv_connector", connector]) as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        await pd.until_empty()
        assert await _counters(pd, "prefill") == await _counters(pd, "decode") == {}
    assert answer["choices"] == (await unified_answer(BODY, "vllm"))["choices"]


@needs_nixl
async def test_nixl_says_that_a_killed_prefill_is_gone() -> None:
    """It is killed between the legs, when hands have been shaken: the read is posted, and NIXL refuses it."""
    async with running(everybody=REAL) as pd:
        first = await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)
        assert first.status_code == 200
        told = BODY | {"prompt": f"other {PROMPT}", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        prefilled = (await pd.client.post(f"{pd.up.servers['prefill']}/v1/completions", json=told)).json()
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        told |= {"kv_transfer_params": prefilled["kv_transfer_params"]}
        answer = await pd.client.post(f"{pd.up.servers['decode']}/v1/completions", json=told)
        assert answer.status_code == 500
        assert not any((await pd.debug("decode"))["outstanding"].values())
        assert (await _counters(pd, "decode"))["failed_transfers"] == 1
