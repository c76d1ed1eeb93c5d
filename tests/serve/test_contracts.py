"""What real routers and clients rely on (clients reference §11), asked of both engines without any of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.live import PATIENCE_S, LiveServer, RawClient, request_bytes, serving
from tests.serve.test_kv_events import subscriber

from windtunnel.ports import free_port
from windtunnel.serve.flags import parse_args

ENGINES = ("vllm", "sglang")
MODEL = "fake-model"
TEXT = "hello there [wt:7]"
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
NEVER = "1000h"
both_engines = pytest.mark.parametrize("engine", ENGINES)


@contextlib.asynccontextmanager
async def talking(engine: str, *flags: str) -> AsyncIterator[tuple[LiveServer, httpx.AsyncClient]]:
    words = [MODEL, "--engine", engine, "--port", "0", "--disable-access-log", *flags]
    async with (
        serving(parse_args(words).config) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield server, client


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> Any:
    told = await client.post(path, json=body, headers=headers)
    assert told.status_code == 200, told.text
    return told.json()


# (a) Unknown and foreign fields: bodies as routers send them (§3, §4.1, §4.3).

_SGLANG_ROUTER = {
    "logprobs": False, "max_completion_tokens": 5, "stream": False, "no_stop_trim": False, "ignore_eos": False,
    "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
    "return_hidden_states": False,
}  # fmt: skip
_VLLM_ROUTER = {**_SGLANG_ROUTER, "max_tokens": 5, "include_reasoning": True, "foo_unknown": 1, "vllm_xargs": {"a": 1}}
SENT = {
    "sglang-router": _SGLANG_ROUTER,
    "vllm-router": _VLLM_ROUTER,
    "smg": {"logprobs": False, "max_tokens": 5, "stream": False, "foo_unknown": 1},
    "litellm": {"max_tokens": 5, "ignore_eos": True, "min_tokens": 5, "user": "u", "metadata": {"a": "b"}},
}


@both_engines
@pytest.mark.parametrize("router", SENT)
async def test_a_foreign_fields_change_nothing(engine: str, router: str) -> None:
    async with talking(engine) as (_, client):
        plain = await answer(client, CHAT_PATH, CHAT)
        told = await answer(client, CHAT_PATH, {"model": MODEL, "messages": MESSAGES} | SENT[router])
        assert told["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
        assert told["usage"]["completion_tokens"] == 5


@both_engines
async def test_a_foreign_fields_of_a_completion_change_nothing(engine: str) -> None:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 5}
    foreign = {"no_stop_trim": False, "separate_reasoning": True, "return_hidden_states": False, "foo_unknown": {"deep": [1]}}
    async with talking(engine) as (_, client):
        plain, told = await answer(client, COMPLETIONS_PATH, body), await answer(client, COMPLETIONS_PATH, body | foreign)
        assert told["choices"] == plain["choices"]


@pytest.mark.parametrize("model", [None, "unknown"])
async def test_b_generate_takes_a_model_that_is_none(model: str | None) -> None:
    extra = {
        "return_text_in_logprobs": False,
        "log_metrics": True,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
    }
    async with talking("sglang") as (_, client):
        body = {"text": TEXT, "sampling_params": {"max_new_tokens": 3}} | extra
        assert (await answer(client, "/generate", body | {"model": model}))["meta_info"]["completion_tokens"] == 3


# (e) The prefill of vLLM's pairs.

_NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
_PREFILL = ("--kv-transfer-config", _NIXL, "--nixl-side-channel-port", "0")
_NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_RELAYED = {"remote_engine_id", "remote_block_ids", "remote_request_id", "remote_host", "remote_port", "tp_size"}
"""What a router carries to the decode without a look at it (§4.3)."""


@pytest.mark.parametrize("nulls", [{}, _NULLS], ids=["smg", "vllm-router"])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
async def test_e_a_prefill_says_where_its_blocks_are_in_a_whole_answer_only(path: str, nulls: dict[str, Any]) -> None:
    body = CHAT if path == CHAT_PATH else {"model": MODEL, "prompt": TEXT}
    asked = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False} | nulls}
    async with talking("vllm", *_PREFILL) as (_, client):
        told = (await answer(client, path, asked))["kv_transfer_params"]
        stream = (await client.post(path, json=asked | {"stream": True})).text
        plain = await answer(client, path, body)
    assert told["do_remote_prefill"] and not told["do_remote_decode"] and told.keys() >= _RELAYED
    assert "remote_block_ids" not in stream and "[DONE]" in stream
    assert plain["kv_transfer_params"] is None


# (c), (g) Prefill and decode of SGLang.


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[list[tuple[LiveServer, httpx.AsyncClient]], int]]:
    bootstrap = free_port()
    told = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
    async with talking("sglang", *told) as prefill, talking("sglang", "--disaggregation-mode", "decode") as decode:
        yield [prefill, decode], bootstrap


async def legs(body: dict[str, Any], path: str, rooms: list[int] | int) -> list[Any]:
    """The answers of prefill and decode, and of a server that is both."""
    async with pair() as (sides, port):
        size = len(rooms) if isinstance(rooms, list) else None
        hosts: Any = "127.0.0.1" if size is None else ["127.0.0.1"] * size
        ports: Any = port if size is None else [port] * size
        triple = {"bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms}
        told = await asyncio.gather(*(answer(client, path, body | triple) for _, client in sides))
    async with talking("sglang") as (_, client):
        return [*told, await answer(client, path, body)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS_PATH, {"model": MODEL, "prompt": [TEXT, "[wt:9] b"], "max_tokens": 6}),
        (CHAT_PATH, CHAT | {"n": 2}),
        ("/generate", {"text": [TEXT, "[wt:9] b"], "sampling_params": {"max_new_tokens": 6}}),
    ],
    ids=["prompts", "choices", "generate"],
)
async def test_c_bootstrap_fields_are_lists_for_batches_and_for_choices(path: str, body: dict[str, Any]) -> None:
    _, decode, unified = await legs(body, path, [5486654861567616659, 8282729405881170009])
    if isinstance(decode, list):
        assert [one["text"] for one in decode] == [one["text"] for one in unified]
    else:
        assert decode["choices"] == unified["choices"]


async def test_g_a_prefill_ends_after_one_token() -> None:
    """sglang-router reads its answer to the end before it sends the first decode byte (§1.4)."""
    prefill, decode, unified = await legs(CHAT, CHAT_PATH, 2590273176584853216)
    assert prefill["usage"]["completion_tokens"] == 1
    assert decode["choices"] == unified["choices"]


# (d) The two names of one limit.


@both_engines
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/chat/completions streamed"])
async def test_d_both_names_of_the_limit_mean_the_same(engine: str, path: str) -> None:
    stream = path.endswith("streamed")
    texts = []
    async with talking(engine) as (_, client):
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"model": MODEL, "messages": MESSAGES, "stream": stream, "ignore_eos": True, name: 7}
            told = await client.post(CHAT_PATH, json=body)
            frames = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: {")] if stream else []
            whole = told.json()["choices"][0]["message"]["content"] if not stream else ""
            texts.append(whole + "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames))
    assert texts[0] == texts[1] and len(texts[0].split()) == 7


# (f) A closed socket frees the request in every phase.


@both_engines
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_f_a_closed_socket_frees_the_request(engine: str, phase: str, stream: bool) -> None:
    """Nothing here would end by itself. SGLang looks for lost clients every 2 s or 4 s, here 20 ms or 40 ms."""
    slow = {"prefill": "--ttft", "decode": "--itl"}[phase]
    async with talking(engine, slow, NEVER, "--time-scale", "100") as (server, _):
        client = await RawClient.connect(server.port)
        client.send(request_bytes(CHAT_PATH, CHAT | {"stream": stream, "max_tokens": 50}))
        await server.until(lambda: server.states() == [phase])
        client.leave("fin")
        await server.until(lambda: server.states() == [] and len(server.server.jobs) == 0)
        server.server.engine.check_integrity()


# (h) What load monitors read.


async def test_h_loads_of_sglang() -> None:
    async with talking("sglang", "--dp-size", "2") as (_, client):
        told = (await client.get("/get_load")).json()
        assert [one["dp_rank"] for one in told] == [0, 1]
        assert all({"num_reqs", "num_waiting_reqs", "num_tokens"} <= one.keys() for one in told)
        loads = (await client.get("/v1/loads?include=core,disagg,queues,memory")).json()["loads"]
        assert [one["dp_rank"] for one in loads] == [0, 1]
        assert all("num_waiting_reqs" in one for one in loads)


@pytest.mark.parametrize("ranks", [1, 3])
async def test_h_one_engine_label_for_each_rank_of_vllm(ranks: int) -> None:
    """vllm-router counts them (§1.6)."""
    async with talking("vllm", "--data-parallel-size", str(ranks)) as (_, client):
        families = text_string_to_metric_families((await client.get("/metrics")).text)
        labels = {s.labels["engine"] for family in families for s in family.samples if "engine" in s.labels}
        assert labels == {str(rank) for rank in range(ranks)}


# (i) The rank of a request.


@pytest.mark.parametrize(
    ("engine", "where"), [("sglang", "body"), ("sglang", "header"), ("vllm", "header")], ids=lambda value: str(value)
)
async def test_i_the_rank_is_the_one_that_was_asked_for(engine: str, where: str) -> None:
    clients = []
    async with talking(engine, "--data-parallel-size", "2", "--itl", NEVER) as (server, _):
        for rank in (1, 1, 0):
            clients.append(await RawClient.connect(server.port))
            body = CHAT | {"stream": True} | ({"data_parallel_rank": rank} if where == "body" else {})
            head = f"x-data-parallel-rank: {rank}\r\n" if where == "header" else ""
            clients[-1].send(request_bytes(CHAT_PATH, body, extra=head))
        await server.until(lambda: [len(engine.live()) for engine in server.server.engines] == [1, 2])


async def test_i_vllm_takes_a_rank_in_the_body_as_a_foreign_field() -> None:
    """smg's `--dp-aware` puts it there whatever the engine."""
    async with talking("vllm", "--data-parallel-size", "2") as (_, client):
        assert (await answer(client, CHAT_PATH, CHAT | {"data_parallel_rank": 1}))["usage"]["completion_tokens"] == 5


# (j) KV events are tagged maps.

_STORED = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"}
_KV = {
    "vllm": ("--block-size", "4", '{"enable_kv_cache_events": true, "endpoint": "%s"}'),
    "sglang": ("--page-size", "4", '{"publisher": "zmq", "endpoint": "%s"}'),
}


@both_engines
async def test_j_kv_events_are_tagged_maps(engine: str) -> None:
    """vllm-router refuses the array form (§1.7)."""
    size, value, config = _KV[engine]
    with subscriber() as sub:
        sub.sub.subscribe(b"")
        flags = (size, value, "--kv-events-config", config % sub.endpoint)
        async with talking(engine, *flags) as (_, client):
            payload = await _first_payload(client, sub)
    _, events, rank = msgpack.unpackb(payload)
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert rank == 0 and stored
    for event in stored:
        assert event.keys() >= _STORED
        assert event["block_size"] == 4 and event["medium"] == "GPU"
        assert len(event["token_ids"]) == 4 * len(event["block_hashes"])
        assert all(isinstance(one, int) for one in event["block_hashes"])


async def _first_payload(client: httpx.AsyncClient, sub: Any) -> bytes:
    """A publisher that has just connected loses messages: make events until one arrives."""
    async with asyncio.timeout(PATIENCE_S):
        for number in count():
            prompt = " ".join(f"w{number}x{word}" for word in range(12))
            await answer(client, COMPLETIONS_PATH, {"model": MODEL, "prompt": prompt, "max_tokens": 4})
            if await sub.sub.poll(20):
                break
    frames = await sub.sub.recv_multipart()
    assert len(frames) == 3 and len(frames[1]) == 8
    return bytes(frames[2])
