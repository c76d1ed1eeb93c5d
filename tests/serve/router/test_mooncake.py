"""The balancer as vLLM's example proxy for Mooncake: both legs at once, and a prefill's leg that belongs to nobody."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.serve.live import PATIENCE_S, RawClient, request_bytes
from tests.serve.router.fake_worker import router, workers
from tests.serve.vllm_pd.mooncake_pair import MooncakePair, counters, mooncake
from tests.serve.vllm_pd.pair import COMPLETION, engine_of, until

from windtunnel.cli.router import parse
from windtunnel.core.vllm.connector.params import MAX_RANKS
from windtunnel.wire.sglang.pairing import PrefillAddress
from windtunnel.wire.vllm.mooncake import EngineEntry, MooncakeError, engine_ids, query_answer
from windtunnel.wire.vllm.pairing import mooncake_bodies

PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def routed() -> AsyncIterator[tuple[MooncakePair, str]]:
    async with mooncake({"dev_mode": True}) as pd:
        port = int((await pd.transport(pd.p))["bootstrap"].rpartition(":")[2])
        prefills = (PrefillAddress(pd.p.url, "127.0.0.1", port),)
        async with router(mooncake=True, prefills=prefills, decodes=(pd.d.url,)) as url:
            yield pd, url


async def until_waiting(pd: MooncakePair) -> None:
    """The prefill is paused and has its own request and the decode's pull."""
    await until(lambda: engine_of(pd.p).outstanding()["pulls"] and pd.p.states() == ["queued"])


async def test_the_legs_go_out_at_once() -> None:
    """The decode waits at the prefill before that has a token."""
    async with routed() as (pd, url):
        await pd.client.post(f"{pd.p.url}/pause?mode=keep")
        asking = asyncio.ensure_future(pd.client.post(url + PATH, json=COMPLETION))
        await until_waiting(pd)
        await pd.client.post(f"{pd.p.url}/resume")
        answer = await asking
        alone = await pd.client.post(pd.p.url + PATH, json=COMPLETION)
        assert answer.json()["choices"] == alone.json()["choices"]
        await pd.until_idle()
        assert counters(pd.d) == counters(pd.p) == {}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_during_the_prefill_takes_the_decode_along_only(stream: bool) -> None:
    """The prefill ends, writes into blocks that are nobody's any more, and both are free without a time-out."""
    async with routed() as (pd, url):
        await pd.client.post(f"{pd.p.url}/pause?mode=keep")
        client = await RawClient.connect(int(url.rpartition(":")[2]))
        client.send(request_bytes(PATH, COMPLETION | {"stream": stream}))
        await until_waiting(pd)
        client.leave("rst")
        await until(lambda: engine_of(pd.d).outstanding()["orphaned_loads"])
        assert pd.p.states() == ["queued"]
        await pd.client.post(f"{pd.p.url}/resume")
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


async def test_a_decode_s_refusal_is_the_client_s_and_lets_go() -> None:
    async with routed() as (pd, url):
        refused = await pd.client.post(url + PATH, json=COMPLETION | {"max_tokens": 10_000_000})
        assert refused.status_code == 400
        await pd.until_idle()
        assert counters(pd.p) == {}


async def test_without_a_bootstrap_server_it_is_a_503() -> None:
    async with workers(200, 200) as (p, d):
        async with (
            router(mooncake=True, prefills=(PrefillAddress(p.url, "127.0.0.1", 1),), decodes=(d.url,)) as url,
            mooncake() as pd,
        ):
            answer = await pd.client.post(url + PATH, json=COMPLETION)
            broken = await pd.client.post(url + PATH, content=b"[]")
        assert (answer.status_code, broken.status_code) == (503, 400)
        assert p.bodies == d.bodies == []


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "refused"])
async def test_a_bootstrap_server_that_does_not_answer_leaves_the_other_prefills_at_work(silent: bool) -> None:
    """And a question that is open when the router ends is given up."""
    async with workers(200, 200, 200, 200) as (dead, p, d, boot), workers(200) as (mute,):
        boot.answer = says("e")
        mute.go.clear()
        ports = [int(mute.url.rpartition(":")[2]) if silent else 1, int(boot.url.rpartition(":")[2])]
        prefills = tuple(PrefillAddress(one.url, "127.0.0.1", port) for one, port in zip((dead, p), ports, strict=True))
        async with (
            router(mooncake=True, prefills=prefills, decodes=(d.url,)) as url,
            httpx.AsyncClient(timeout=PATIENCE_S) as client,
        ):
            statuses = [(await client.post(url + PATH, json=COMPLETION)).status_code for _ in range(4)]
            assert statuses == [200] * 4
            await until(lambda: len(p.bodies) == 4)
            assert len(mute.bodies) == silent and dead.bodies == []
        await until(lambda: mute.gone == silent)


async def test_legs_that_clients_have_left_have_a_limit() -> None:
    async with workers(200, 200, 200) as (p, d, boot):
        boot.answer = says("e")
        p.go.clear()
        d.go.clear()
        prefills = (PrefillAddress(p.url, "127.0.0.1", int(boot.url.rpartition(":")[2])),)
        async with router(mooncake=True, prefills=prefills, decodes=(d.url,), connections=2) as url:
            for gone in (1, 2):
                raw = await RawClient.connect(int(url.rpartition(":")[2]))
                raw.send(request_bytes(PATH, COMPLETION))
                await until(lambda gone=gone: len(d.bodies) == len(p.bodies) == gone)
                raw.leave("fin")
                await until(lambda gone=gone: d.gone == gone)
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                refused = await client.post(url + PATH, json=COMPLETION)
                assert refused.status_code == 503 and "2 prefills are under way already" in refused.text
                p.go.set()
                d.go.set()
                async with asyncio.timeout(PATIENCE_S):
                    while (await client.post(url + PATH, json=COMPLETION)).status_code != 200:
                        """The answers of the prefills are still on their way."""


async def test_a_prefill_that_was_restarted_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its bootstrap server has said grows old; a server that says nothing good changes nothing."""
    monkeypatch.setattr("windtunnel.serve.router.mooncake.AGAIN_S", 0.0)
    async with workers(200, 200, 200) as (p, d, boot), httpx.AsyncClient(timeout=PATIENCE_S) as client:
        prefills = (PrefillAddress(p.url, "127.0.0.1", int(boot.url.rpartition(":")[2])),)
        async with router(mooncake=True, prefills=prefills, decodes=(d.url,)) as url:

            async def engine_id() -> str:
                assert (await client.post(url + PATH, json=COMPLETION)).status_code == 200
                told: str = d.bodies[-1]["kv_transfer_params"]["remote_engine_id"]
                return told

            boot.answer = says("old")
            assert await engine_id() == "old"
            boot.answer = {"0": "nonsense"}
            assert [await engine_id() for _ in range(3)] == ["old"] * 3
            boot.answer = says("new")
            async with asyncio.timeout(PATIENCE_S):
                while await engine_id() != "new":
                    """The answer is on its way beside a request."""


def says(engine_id: str) -> Any:
    """What a bootstrap server answers."""
    return json.loads(query_answer({0: EngineEntry(engine_id, {0: {0: "tcp://127.0.0.1:1"}})}))


def test_more_engines_than_anybody_has_are_no_answer() -> None:
    many = query_answer({rank: EngineEntry("e", {}) for rank in range(MAX_RANKS + 1)})
    with pytest.raises(MooncakeError, match="1025 engines are registered: must be 1 to 1024"):
        engine_ids(many)


def test_the_bodies() -> None:
    body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "foo": 1}
    to_prefill, to_decode = mooncake_bodies(PATH, body, "xfer-1", "http://h:8998", "e")
    ones = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
    told = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    assert to_prefill == {"prompt": "x", "foo": 1, "stream": False, "kv_transfer_params": told} | ones
    assert to_decode == body | {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://h:8998",
            "remote_engine_id": "e",
            "transfer_id": "xfer-1",
        }
    }
    entries = {1: EngineEntry("e1", {}), 0: EngineEntry("e0", {})}
    assert engine_ids(query_answer(entries)) == {0: "e0", 1: "e1"}


PAIR = ["--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2"]


def test_the_flag() -> None:
    config = parse(["--vllm-pd-disaggregation", "--kv-connector", "mooncake", *PAIR])
    assert config.mooncake and config.sidecar is None and config.prefills[0].bootstrap_port == 8998
    assert parse(["--vllm-pd-disaggregation", "--kv-connector", "nixl", *PAIR]).sidecar is not None


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--kv-connector", "mooncake"], "needs --vllm-pd-disaggregation"),
        (["--vllm-pd-disaggregation", "--kv-connector", "moriio"], "must be one of nixl, mooncake"),
        (["--vllm-pd-disaggregation", "--kv-connector", "mooncake", "--header-only"], "leave them out with mooncake"),
        (["--pd-disaggregation", "--vllm-pd-disaggregation", "--kv-connector", "mooncake"], "exclude each other"),
    ],
)
def test_flags_that_are_refused(args: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse([*args, *PAIR])
