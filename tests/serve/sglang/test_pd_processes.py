"""Prefill, decode and router as processes of one command: text, aborts of each leg, loss of either side, clean end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.live import serving

from windtunnel.serve.flags import parse_args
from windtunnel.serve.up.plan import Ports, UpError, preset, read, with_args
from windtunnel.serve.up.processes import Fleet, Up

PATIENCE_S = 60
PROMPT = "[wt:abc123] tell me about " + " ".join(["prefill and decode"] * 30)


@dataclass
class Running:
    fleet: Fleet
    up: Up
    client: httpx.AsyncClient

    def pid(self, name: str) -> int:
        return self.fleet._processes[name].pid

    async def debug(self, name: str) -> dict[str, Any]:
        (part,) = (await self.client.get(f"{self.up.servers[name]}/debug/disaggregation")).json()
        return part  # type: ignore[no-any-return]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Ask again until it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(0.01)

    async def empty(self) -> bool:
        parts = [await self.debug(name) for name in self.up.servers]
        return not any(any(part["outstanding"].values()) for part in parts)

    async def until_empty(self) -> None:
        await self.until(self.empty)

    async def queue(self, name: str, queue: str) -> int:
        live = (await self.client.get(f"{self.up.servers[name]}/debug/requests")).json()["live"]
        return sum(one["resources"].get("queue") == queue for one in live)


@contextlib.asynccontextmanager
async def running(router: Any = "windtunnel", **args: list[str]) -> AsyncIterator[Running]:
    plan = preset("sglang-pd")
    told = {"": ["--disable-access-log"], **{key.replace("everybody", ""): value for key, value in args.items()}}
    fleet = Fleet(with_args(type(plan)(plan.servers, router, liveness_s=0), told))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            yield Running(fleet, up, client)
    finally:
        await fleet.stop()


async def unified_answer(body: dict[str, Any], engine: str = "sglang") -> dict[str, Any]:
    """Of a server of `up` that is alone. It is no process of its own: only its words count here."""
    (one,) = preset(engine, workers=1).servers
    words = [Ports({one.name: 0}).fill(word, one.name) for word in one.args]
    async with serving(parse_args(words).config) as server, httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        return (await client.post(f"{server.url}/v1/completions", json=body)).json()  # type: ignore[no-any-return]


async def test_the_text_is_the_unified_servers_and_everything_is_given_back() -> None:
    body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
    async with running() as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=body)).json()
        stream = (await pd.client.post(f"{pd.up.url}/v1/completions", json={**body, "stream": True})).text
        both = await pd.client.post(
            f"{pd.up.url}/generate", json={"text": [PROMPT, "[wt:9] b"], "sampling_params": {"max_new_tokens": 3}}
        )
        await a_request_without_a_room_is_refused(pd)
        await pd.until_empty()
    unified = await unified_answer(body)
    text = unified["choices"][0]["text"]
    assert len(text.split()) == 12
    assert answer["choices"] == unified["choices"] and answer["usage"] == unified["usage"]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert stream.rstrip().endswith("data: [DONE]")
    assert [one["meta_info"]["finish_reason"]["type"] for one in both.json()] == ["length", "length"]


async def a_request_without_a_room_is_refused(pd: Running) -> None:
    for name in ("prefill", "decode"):
        answer = await pd.client.post(
            f"{pd.up.servers[name]}/v1/completions", json={"model": "windtunnel", "prompt": "a", "max_tokens": 2}
        )
        assert answer.status_code == 400
        assert "Disaggregated request received without bootstrap room id" in answer.text
    health = [await pd.client.get(f"{url}/health") for url in pd.up.servers.values()]
    assert [one.status_code for one in health] == [200, 200]


async def test_a_client_that_leaves_frees_both_legs() -> None:
    """Its stream is 0.4 s of detection away from being found gone (4 s, ten times faster), then nothing is held."""
    async with running(everybody=["--time-scale", "10"], prefill=["--pacing", "step", "--step-base", "60s"]) as pd:
        body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12, "stream": True}
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=body))
        await pd.until(lambda: pd.queue("decode", "transfer"))
        asking.cancel()
        await pd.until_empty()


async def test_an_abort_of_the_prefill_leg_leaves_the_decode_to_its_timeout() -> None:
    """300 s here are 3 s; the decode then answers 500 (SGLang reference §5, §3.3). The prefill's scheduler hangs meanwhile."""
    async with running(everybody=["--time-scale", "100"]) as pd:
        port = pd.up.ports.bootstrap["prefill"]
        told = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 77}
        body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12, **told}
        urls = [f"{pd.up.servers[name]}/v1/completions" for name in ("prefill", "decode")]
        await pd.client.post(f"{pd.up.servers['prefill']}/debug/engine_freeze")
        legs = [asyncio.ensure_future(pd.client.post(url, json=body)) for url in urls]
        await pd.until(lambda: pd.queue("prefill", "bootstrap"))
        await pd.client.post(f"{pd.up.servers['prefill']}/abort_request", json={"abort_all": True})
        answer = await legs[1]
        legs[0].cancel()
        assert answer.status_code == 500
        assert "Decode transfer failed" in answer.text and "KVPoll.WaitingForInput" in answer.text
        metrics = (await pd.client.get(f"{pd.up.servers['decode']}/metrics")).text
        assert 'sglang:num_transfer_failed_reqs_total{engine_type="decode"' in metrics


async def test_an_abort_of_the_decode_leg_ends_both_with_500() -> None:
    async with running(prefill=["--pacing", "step", "--step-base", "2s"]) as pd:
        body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=body))
        await pd.until(lambda: pd.queue("decode", "transfer"))
        await pd.client.post(f"{pd.up.servers['decode']}/abort_request", json={"abort_all": True})
        answer = await asking
        assert answer.status_code == 500 and "Aborted by AbortReq." in answer.text
        await pd.until_empty()


async def test_a_killed_prefill_is_lost_after_two_heartbeats() -> None:
    async with running(everybody=["--time-scale", "10"], prefill=["--pacing", "step", "--step-base", "600s"]) as pd:
        body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}
        decode = f"{pd.up.servers['decode']}/v1/completions"
        port = pd.up.ports.bootstrap["prefill"]
        told = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 77}
        asking = asyncio.ensure_future(pd.client.post(decode, json={**body, **told}))
        await pd.until(lambda: pd.queue("decode", "transfer"))
        os.kill(pd.pid("prefill"), signal.SIGKILL)
        answer = await asking
        assert answer.status_code == 500 and "Lost connection with prefill instance" in answer.text


async def test_a_killed_decode_is_reported_by_the_transport() -> None:
    """30 s after it has gone, here a tenth of a second: the inflight request fails, and nothing is held."""
    slow = ["--transfer-bandwidth", "0.000001"]
    async with running(everybody=["--time-scale", "300"], prefill=slow) as pd:
        body = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12, "stream": True}
        asking = asyncio.ensure_future(pd.client.post(f"{pd.up.url}/v1/completions", json=body))
        await pd.until(lambda: pd.queue("prefill", "inflight"))
        os.kill(pd.pid("decode"), signal.SIGKILL)
        with contextlib.suppress(httpx.HTTPError):
            await asking

        async def idle() -> bool:
            return not any((await pd.debug("prefill"))["outstanding"].values())

        await pd.until(idle)


async def test_up_says_where_it_is_and_stops_when_asked() -> None:
    words = [sys.executable, "-m", "windtunnel", "up", "vllm", "--workers", "1", "--liveness", "0s"]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        lines = [await process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith(b"vllm-1: http://127.0.0.1:") and lines[1].startswith(b"ready: http://127.0.0.1:")
        url = lines[1].split()[1].decode()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            assert (await client.get(f"{url}/v1/models")).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{lines[0].split()[1].decode()}/v1/models")


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        [[server]]
        name = "p"
        role = "prefill"
        args = ["--port", "{port}", "--disaggregation-bootstrap-port", "{bootstrap_port}"]

        [[server]]
        name = "d"
        role = "decode"
        args = ["--port", "{port}"]
        port = 7

        [router]
        port = 9
        """
    )
    plan = read(path)
    assert [server.role for server in plan.servers] == ["prefill", "decode"]
    assert plan.pd and plan.router == "windtunnel" and plan.router_port == 9 and plan.servers[1].port == 7


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "0 servers"),
        ('[[server]]\nname = "a"', "name and args"),
        ('[[server]]\nname = "a"\nargs = []\nrole = "boss"', "role"),
        ('[[server]]\nname = "a"\nargs = []\n[[server]]\nname = "a"\nargs = []', "name"),
        ('[[server]]\nname = "a"\nargs = []\nwhat = 1', "what"),
        ('[router]\nkind = "nginx"', "kind"),
        ("[[", "TOML"),
    ],
)
def test_a_bad_plan_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UpError, match=what):
        read(path)
