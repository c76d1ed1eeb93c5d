"""vLLM prefill/decode over real sockets: the text, clients that leave in every phase, failures, and what is held meanwhile."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.serve.live import FOREVER_NS, PATIENCE_S, live
from tests.serve.vllm_pd.pair import (
    COMPLETION,
    HELD,
    MODEL,
    PROMPT,
    at_rest,
    counters,
    engine_of,
    holds,
    land,
    moving,
    pair,
    until,
)

from windtunnel.core.units import S
from windtunnel.wire.vllm import pairing

MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 12},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"model": MODEL, "input": PROMPT, "max_output_tokens": 12},
}
FAST: dict[str, Any] = {"pacing__time_scale": 100.0}
"""A lease of 0.3 s, for tests in which it runs out anyway."""
UNHURRIED: dict[str, Any] = {"pacing__time_scale": 10.0}
"""A lease of 3 s, for tests in which it runs out, but not before they have looked. Elsewhere it is the 30 s of vLLM."""


def _text(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/completions":
        return str(answer["choices"][0]["text"])
    if path == "/v1/chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    part = answer["content"][0] if path == "/v1/messages" else answer["output"][0]["content"][0]
    return str(part["text"])


def _streamed_text(path: str, stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    if path == "/v1/completions":
        return "".join(event["choices"][0]["text"] for event in events)
    if path == "/v1/chat/completions":
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    if path == "/v1/messages":
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.parametrize("path", BODIES)
async def test_the_text_is_the_single_servers_and_everything_is_given_back(path: str) -> None:
    body = BODIES[path]
    async with live() as single, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        wanted = _text(path, (await client.post(single.url + path, json=body)).json())
    assert len(wanted.split()) == 12
    async with pair() as pd:
        whole = await pd.post(path, body)
        assert _text(path, whole.json()) == wanted
        stream = await pd.post(path, body | {"stream": True})
        assert _streamed_text(path, stream.text) == wanted
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


async def test_the_blocks_have_come_from_the_prefill() -> None:
    """All but the last token of the prompt is read, and the prefix cache of the decode has it afterwards."""
    async with pair() as pd:
        await pd.post("/v1/completions", COMPLETION)
        tokens = (await pd.post("/tokenize", {"model": MODEL, "prompt": PROMPT})).json()["count"]
        assert pd.d.gauge("vllm:external_prefix_cache_hits_total") == tokens - 1
        assert pd.p.gauge("vllm:external_prefix_cache_hits_total") == 0
        debug = (await pd.client.get(f"{pd.d.url}/debug/disaggregation")).json()
        assert list(debug[0]["transport"]["peers"]) == [engine_of(pd.p).connector.config.engine_id]


async def test_the_debug_page_shows_what_is_held_and_for_how_long() -> None:
    async with pair() as pd:
        params = await pd.prefilled()
        (part,) = (await pd.client.get(f"{pd.p.url}/debug/disaggregation")).json()
    (hold,) = part["holds"]
    assert (hold["request_id"], [hold["blocks"]]) == (params["remote_request_id"], params["remote_block_ids"])
    assert 0 < hold["lease_ms"] <= 30_000
    assert part["outstanding"]["holds"] == 1


async def test_the_prefill_answers_where_its_side_channel_is() -> None:
    async with pair({"kv_transfer__engine_id": "mine"}) as pd:
        params = await pd.prefilled()
        (part,) = (await pd.client.get(f"{pd.p.url}/debug/disaggregation")).json()
    assert (params["remote_host"], params["remote_port"]) == ("localhost", part["transport"]["side_channel_port"])
    assert params["remote_engine_id"] == "mine"


# A client that leaves, in every phase


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_the_prefill(stream: bool) -> None:
    async with pair(p={"pacing__ttft_ns": FOREVER_NS}) as pd:
        asking = asyncio.ensure_future(pd.post("/v1/completions", COMPLETION | {"stream": stream}))
        await until(lambda: pd.p.states() == ["prefill"])
        asking.cancel()
        await pd.until_idle()
        assert counters(pd.p) == {}, "freed at once, not by a lease"


async def test_leaving_after_the_prefill_leaves_its_blocks_for_the_lease() -> None:
    async with pair(UNHURRIED) as pd:
        await pd.prefilled()
        assert (holds(pd.p), pd.p.gauge("vllm:num_requests_running")) == (1, 0)
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 1}
        assert pd.p.gauge("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_decode_is_scheduled_tells_the_prefill(stream: bool) -> None:
    async with pair(d={"scheduler__max_num_seqs": 1, "pacing__itl_ns": FOREVER_NS}) as pd:
        busy = asyncio.ensure_future(pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION))
        await until(lambda: pd.d.states() == ["decode"])
        client = await pd.decoding(await pd.prefilled(), stream=stream)
        await until(lambda: len(pd.d.states()) == 2)
        client.leave("fin")
        await until(lambda: at_rest(pd.p))
        busy.cancel()
        await pd.until_idle()
        assert counters(pd.p) == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_the_decode_reads_frees_both_when_the_read_has_ended(stream: bool) -> None:
    """The blocks of the decode wait for the transport (vLLM #32255), and the prefill for the decode."""
    async with pair(d=HELD) as pd:
        client = await pd.decoding(await pd.prefilled(), stream=stream)
        await until(lambda: moving(pd.d))
        client.leave("rst")
        await until(lambda: not pd.d.states())
        assert engine_of(pd.d).outstanding()["orphaned_loads"] == holds(pd.p) == 1
        land(pd.d)
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_the_decode_generates(stream: bool) -> None:
    async with pair(d={"pacing__itl_ns": FOREVER_NS}) as pd:
        asking = asyncio.ensure_future(pd.post("/v1/completions", COMPLETION | {"stream": stream}))
        await until(lambda: pd.d.states() == ["decode"])
        await until(lambda: at_rest(pd.p))
        asking.cancel()
        await pd.until_idle()


async def test_a_slow_read_keeps_its_lease_by_heartbeats() -> None:
    async with pair(UNHURRIED, d={"kv_transfer__transfer_latency_ns": 40 * S}) as pd:
        answer = await pd.post("/v1/completions", COMPLETION)
        assert answer.status_code == 200
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


async def test_the_older_timeout_is_not_extended() -> None:
    """480 s without a word, of which 4.8 s are too few for a read that takes 6 (vLLM #25897, bug 42)."""
    settings = {"kv_transfer__hold": "timeout", "pacing__time_scale": 1000.0, "kv_transfer__transfer_latency_ns": 600 * S}
    async with pair(settings) as pd:
        answer = await pd.post("/v1/completions", COMPLETION)
        assert answer.status_code == 200
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 1, "notifications_after_expiry": 1}


# Refusals by the decode


async def test_a_refusal_before_admission_releases_the_prefill() -> None:
    async with pair() as pd:
        told = COMPLETION | {"kv_transfer_params": await pd.prefilled()}
        refused = await pd.client.post(f"{pd.d.url}/v1/completions", json=told | {"max_tokens": 10**6})
        assert refused.status_code == 400
        await pd.until_idle()
        assert counters(pd.p) == {}


async def test_an_overloaded_decode_releases_the_prefill() -> None:
    async with pair(d={"scheduler__max_num_queued_reqs": 1, "scheduler__max_num_seqs": 1, "pacing__itl_ns": FOREVER_NS}) as pd:
        other = asyncio.ensure_future(pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION))
        await until(lambda: pd.d.states() == ["decode"])
        refused = await pd.post("/v1/completions", COMPLETION)
        assert refused.status_code == 503
        await until(lambda: at_rest(pd.p))
        other.cancel()
        await pd.until_idle()
        assert counters(pd.p) == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"max_tokens": "many"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 10**6}}),
    ],
)
async def test_some_refusals_tell_nobody(path: str, body: dict[str, Any]) -> None:
    """Errors of the body as such, and the token-in route: the lease has to end (reference §7.2)."""
    async with pair(FAST | {"enable_scale_out": True}) as pd:
        told = COMPLETION | body | {"kv_transfer_params": await pd.prefilled()}
        assert (await pd.client.post(f"{pd.d.url}{path}", json=told)).status_code == 400
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 1}


# Failures


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_load_is_an_error(stream: bool) -> None:
    async with pair(FAST, d={"kv_transfer__fates": (("fail", 1.0),)}) as pd:
        answer = await pd.post("/v1/completions", COMPLETION | {"stream": stream})
        if stream:
            assert (answer.status_code, json.loads(answer.text.split("data: ")[1])["error"]["code"]) == (200, 500)
        else:
            assert answer.status_code == 500
        await pd.until_idle()
        assert counters(pd.d) == {"failed_transfers": 1}


async def test_a_failed_load_may_be_computed_again() -> None:
    policy = {"kv_transfer__fates": (("fail", 1.0),), "kv_transfer__kv_load_failure_policy": "recompute"}
    async with pair(FAST) as sound:
        wanted = (await sound.post("/v1/completions", COMPLETION)).json()["choices"]
    async with pair(FAST, d=policy) as pd:
        answer = await pd.post("/v1/completions", COMPLETION)
        assert answer.json()["choices"] == wanted
        await pd.until_idle()
        assert counters(pd.d) == {"failed_transfers": 1}


async def test_another_model_has_another_hash() -> None:
    async with pair(FAST, d={"scheduler__block_size": 32}) as pd:
        assert (await pd.post("/v1/completions", COMPLETION)).status_code == 500
        await pd.until_idle()
        assert counters(pd.d) == {"failed_transfers": 1}


async def test_nobody_behind_the_side_channel() -> None:
    async with pair(FAST) as pd:
        params = await pd.prefilled() | {"remote_host": "127.0.0.1", "remote_port": 1}
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 500
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 1}


async def test_another_engine_behind_the_side_channel() -> None:
    """A prefill that came back with another identity, or localhost on another node (vLLM #27083, #41863)."""
    async with pair(FAST) as pd:
        params = await pd.prefilled() | {"remote_engine_id": "another"}
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 500
        await pd.until_idle()


async def test_incomplete_parameters_are_computed_here() -> None:
    async with pair(FAST) as pd:
        params = await pd.prefilled() | {"remote_block_ids": None}
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 200
        await pd.until_idle()


async def test_a_late_read_answers_200_with_somebody_elses_words() -> None:
    """The prefill's lease runs out while the decode's engine is frozen and sends no heartbeats (bug 42)."""
    one_prompt = {"scheduler__num_gpu_blocks": 40, "scheduler__max_model_len": 500, "scheduler__enable_prefix_caching": False}
    async with pair(FAST, p=one_prompt) as pd:
        sound = (await pd.post("/v1/completions", COMPLETION)).json()["choices"][0]["text"]
    async with pair(FAST, p=one_prompt) as pd:
        params = await pd.prefilled()
        await until(lambda: counters(pd.p) == {"kv_expired_reqs": 1})
        other = COMPLETION | {"prompt": "[wt:b2] " + "something else " * 40, "max_tokens": 100}
        await pd.client.post(f"{pd.p.url}/v1/completions", json=other)
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] != sound
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 1, "notifications_after_expiry": 1}


# n, push, ranks


async def test_n_choices_read_once_and_leave_the_other_holds_to_the_lease() -> None:
    """vLLM #43509: n prefills hold, and all n decodes tell the one that the router has named."""
    async with pair(UNHURRIED) as pd:
        answer = await pd.post("/v1/completions", COMPLETION | {"n": 3})
        assert len(answer.json()["choices"]) == 3
        await pd.until_idle()
        assert counters(pd.p) == {"kv_expired_reqs": 2, "notifications_after_expiry": 2}


@pytest.mark.parametrize("stream", [True, False])
async def test_push(stream: bool) -> None:
    async with pair({"kv_transfer__kv_connector": "NixlPushConnector"}) as pd:
        async with live() as single:
            wanted = (await pd.client.post(f"{single.url}/v1/completions", json=COMPLETION)).json()["choices"][0]["text"]
        answer = await pd.post("/v1/completions", COMPLETION | {"stream": stream})
        path = "/v1/completions"
        assert (_streamed_text(path, answer.text) if stream else _text(path, answer.json())) == wanted
        await pd.until_idle()


async def test_leaving_during_a_push() -> None:
    push = {"kv_transfer__kv_connector": "NixlPushConnector"}
    async with pair(push, p=HELD) as pd:
        client = await pd.decoding(await pd.prefilled())
        await until(lambda: moving(pd.p))
        client.leave("fin")
        await until(lambda: not pd.d.states())
        assert engine_of(pd.d).outstanding()["orphaned_loads"] == 1
        land(pd.p)
        await pd.until_idle()


async def test_each_rank_has_a_side_channel_and_an_engine_of_its_own() -> None:
    async with pair({"data_parallel_size": 2}) as pd:
        for rank in ("0", "1"):
            told = COMPLETION | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            headers = {"x-data-parallel-rank": rank}
            answer = await pd.client.post(f"{pd.p.url}/v1/completions", json=told, headers=headers)
            params = answer.json()["kv_transfer_params"]
            assert params["remote_engine_id"].endswith(f"_dp{rank}")
            body = COMPLETION | {"kv_transfer_params": params}
            assert (await pd.client.post(f"{pd.d.url}/v1/completions", json=body, headers=headers)).status_code == 200
        parts = (await pd.client.get(f"{pd.p.url}/debug/disaggregation")).json()
        assert len({part["transport"]["side_channel_port"] for part in parts}) == 2
        assert not any(any(part["outstanding"].values()) for part in parts)


# Between the legs


@pytest.mark.parametrize(("cure", "wanted"), [(False, {"kv_expired_reqs": 1}), (True, {})])
async def test_the_gap_between_the_legs_and_its_cure(
    cure: bool, wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves there: the blocks stay for the whole lease, unless the decode is sent all the same (bug 92)."""
    between = asyncio.Event()
    decode_body = pairing.decode_body

    def seen(body: Any, told: Any) -> Any:
        between.set()
        return decode_body(body, told)

    monkeypatch.setattr(pairing, "decode_body", seen)
    async with pair(UNHURRIED, between_legs_s=3600, decode_after_departure=cure) as pd:
        asking = asyncio.ensure_future(pd.post("/v1/completions", COMPLETION))
        await between.wait()
        assert holds(pd.p) == 1
        asking.cancel()
        await pd.until_idle()
        assert counters(pd.p) == wanted
