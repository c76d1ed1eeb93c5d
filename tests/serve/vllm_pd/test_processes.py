"""`up vllm-pd`: prefill, decode and balancer as processes of one command, either side killed, and the real router in front."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serve.sglang.test_pd_processes import PATIENCE_S, PROMPT, Running

from windtunnel.serve.up.plan import preset, with_args
from windtunnel.serve.up.processes import Fleet

BODY = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
ROUTERS = os.environ.get("WINDTUNNEL_ROUTERS", "")


@contextlib.asynccontextmanager
async def running(router: Any = "windtunnel", **args: list[str]) -> AsyncIterator[Running]:
    """`args`: words for one role, or for all with the name `everybody`."""
    plan = replace(preset("vllm-pd"), router=router, liveness_s=0)
    fleet = Fleet(with_args(plan, {key.replace("everybody", ""): value for key, value in args.items()}))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            yield Running(fleet, up, client)
    finally:
        await fleet.stop()


async def _single(path: str, body: dict[str, Any]) -> dict[str, Any]:
    fleet = Fleet(replace(preset("vllm", workers=1), router="none", liveness_s=0))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            return (await client.post(up.url + path, json=body)).json()  # type: ignore[no-any-return]
    finally:
        await fleet.stop()


async def _counters(pd: Running, name: str) -> dict[str, int]:
    (counted,) = (await pd.debug(name))["counters"]
    return {key.removeprefix("nixl_num_"): value for key, value in counted.items() if value}


async def test_the_text_is_the_single_servers_and_everything_is_given_back() -> None:
    async with running() as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        stream = (await pd.client.post(f"{pd.up.url}/v1/completions", json={**BODY, "stream": True})).text
        await pd.until_empty()
        metrics = (await pd.client.get(f"{pd.up.servers['decode']}/metrics")).text
        processes = dict(pd.fleet._processes)
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0), "asked to stop"
    single = await _single("/v1/completions", BODY)
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
        assert (await pd.debug("prefill"))["outstanding"]["holds"] == 1

        async def freed() -> bool:
            return not any((await pd.debug("prefill"))["outstanding"].values())

        await pd.until(freed)
        assert await _counters(pd, "prefill") == {"kv_expired_reqs": 1}


async def test_push_by_the_same_command() -> None:
    async with running(everybody=["--kv-transfer-config.kv_connector", "NixlPushConnector"]) as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        await pd.until_empty()
    assert answer["choices"] == (await _single("/v1/completions", BODY))["choices"]


async def test_the_real_vllm_router_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm-router --vllm-pd-disaggregation --kv-connector nixl`, unchanged: the text is the single server's."""
    monkeypatch.setenv("PATH", f"{ROUTERS}{os.pathsep}{os.environ['PATH']}")
    if shutil.which("vllm-router") is None:
        pytest.skip("vllm-router is not installed: pip install vllm-router, and name its folder in WINDTUNNEL_ROUTERS")
    chat = {"model": "windtunnel", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
    path = "/v1/chat/completions"
    async with running(router="vllm-router") as pd:
        whole = (await pd.client.post(pd.up.url + path, json=chat)).json()
        stream = (await pd.client.post(pd.up.url + path, json={**chat, "stream": True})).text
        await pd.until_empty()
        metrics = (await pd.client.get(f"{pd.up.servers['decode']}/metrics")).text
        assert await _counters(pd, "prefill") == await _counters(pd, "decode") == {}
    text = (await _single(path, chat))["choices"][0]["message"]["content"]
    assert whole["choices"][0]["message"]["content"] == text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == text and stream.rstrip().endswith("data: [DONE]")
    (reads,) = [line for line in metrics.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count{")]
    assert float(reads.split()[-1]) >= 1
