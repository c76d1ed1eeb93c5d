"""The live SGLang server as clients, routers and dashboards meet it (SGLang reference §7, clients reference §3, §4)."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.serve.live import PATIENCE_S, live
from tests.serve.sglang_live import BODIES, NEVER_NS, PHASES, TEXT, events, sample, sglang, talking

from windtunnel.core import oracle

openai: Any = None


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Every worker reads all files of tests, and only one of them needs what takes a second to import."""
    global openai
    openai = pytest.importorskip("openai")


QUICK: dict[str, Any] = {"pacing__time_scale": 100.0}


def oracle_text(words: int) -> str:
    return oracle.text(oracle.identity_of_tag("7"), words)


# Clients


async def test_the_openai_sdk_whole_and_streamed() -> None:
    async with sglang(sglang__enable_cache_report=True) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
        whole = await client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == oracle_text(8)
        assert whole.usage.completion_tokens == 8
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == oracle_text(8)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 8
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
        text = await client.completions.create(model="m", prompt=TEXT, max_tokens=4, n=2, temperature=1.0)
        assert text.choices[0].text == oracle_text(4)
        assert text.choices[1].text != oracle_text(4)
        assert [model.id async for model in client.models.list()] == ["wt-model"]


async def test_an_sdk_error_carries_the_flat_message() -> None:
    async with sglang() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt="x", temperature=-1)
        assert caught.value.body["object"] == "error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_text_is_that_of_the_vllm_server(path: str) -> None:
    texts = []
    for engine in ("vllm", "sglang"):
        async with live(engine=engine) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            body = BODIES[path] | {"model": "wt-model", "max_tokens": 20}
            choice = (await client.post(path, json=body)).json()["choices"][0]
            texts.append(choice.get("text") or choice["message"]["content"])
    assert texts[0] == texts[1] == oracle_text(20)


async def test_a_stream_is_one_event_for_each_token_in_either_form() -> None:
    async with talking() as (_server, client):
        body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 5}}
        told = events((await client.post("/generate", json=body)).text)
        assert [event["text"] for event in told[:-1]] == [oracle_text(count) for count in range(1, 6)]
        chat = BODIES["/v1/chat/completions"] | {"stream": True, "max_tokens": 5}
        told = events((await client.post("/v1/chat/completions", json=chat)).text)
        assert len(told) == 1 + 5 + 1 + 1


async def test_the_head_of_an_openai_stream_waits_for_the_first_output_and_a_native_one_does_not() -> None:
    async with talking(**PHASES["prefill"]) as (server, client):
        async with client.stream("POST", "/generate", json=BODIES["/generate"] | {"stream": True}) as response:
            assert response.status_code == 200
        await server.until(lambda: server.states() == [])
        body = BODIES["/v1/completions"] | {"stream": True}
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await server.until(lambda: server.states() == ["prefill"])
        assert (await client.get("/v1/models")).status_code == 200
        lines = server.server.metrics.store.text().decode().splitlines()
        answered = [line for line in lines if line.startswith("sglang:http_responses_total{")]
        assert any('"/v1/models"' in line for line in answered)
        assert not any('"/v1/completions"' in line for line in answered)
        waiting.cancel()


async def test_what_the_engine_refuses_is_a_400_even_for_a_stream() -> None:
    async with talking(sglang__max_total_tokens=64) as (_server, client):
        body = {"prompt": [5] * 100, "max_tokens": 4, "stream": True}
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["object"]) == (400, "error")
        native = await client.post("/generate", json={"input_ids": [5] * 100, "stream": True})
        told = events(native.text)
        assert (native.status_code, told[0]["error"]["code"], told[1]) == (200, 400, "[DONE]")


async def test_put_and_the_sagemaker_alias() -> None:
    async with talking() as (_server, client):
        assert (await client.put("/generate", json=BODIES["/generate"])).status_code == 200
        assert (await client.post("/invocations", json=BODIES["/v1/chat/completions"])).json()["object"] == "chat.completion"


# Routers and dashboards


async def test_what_a_router_asks_of_a_worker() -> None:
    async with talking(**QUICK, data_parallel_size=2, sglang__tp_size=4) as (_server, client):
        assert (await client.get("/health")).status_code == 200
        info = (await client.get("/server_info")).json()
        assert (info["tp_size"], info["dp_size"], info["disaggregation_mode"]) == (4, 2, "null")
        assert info["max_running_requests"] == 256
        assert len(info["internal_states"]) == 2
        assert info == (await client.get("/get_server_info")).json() | {}
        model = (await client.get("/model_info")).json()
        assert (model["model_path"], model["served_model_name"], model["is_generation"]) == ("wt-model", "wt-model", True)
        assert {"architectures", "model_type", "disaggregation_mode", "weight_version"} <= model.keys()
        load = (await client.get("/get_load")).json()
        assert load[1] == {"dp_rank": 1, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
        assert (await client.get("/loads", params={"model": "m"})).status_code == 404
        assert (await client.get("/")).json() == "SGLang is running"
        assert (await client.get("/ready")).status_code == 200


async def test_loads_move_while_the_gauges_stand_still() -> None:
    async with talking(**PHASES["queued"]) as (server, client):
        tasks = [asyncio.ensure_future(client.post("/generate", json=BODIES["/generate"])) for _ in range(2)]
        await server.until(lambda: server.states() == ["prefill", "queued"])
        told = (await client.get("/v1/loads", params={"include": "core,disagg,queues,memory"})).json()
        load = told["loads"][0]
        assert load["num_running_reqs"] + load["num_waiting_reqs"] == 2
        assert load["queues"]["waiting"] >= 1
        assert load["num_used_tokens"] > 0
        assert load["max_running_requests"] == 1
        assert "lora" not in load
        assert "disaggregation" in load
        plain = await client.get("/v1/loads", params={"format": "prometheus"})
        assert 'sglang:num_waiting_reqs{dp_rank="0"}' in plain.text
        refused = await client.get("/v1/loads", params={"include": "core,foo"})
        assert (refused.status_code, "foo" in refused.json()["message"]) == (400, True)
        assert sample(server, "get_loads_duration_seconds_count") == 2
        for task in tasks:
            task.cancel()


async def test_health_runs_a_request_of_its_own_that_no_metric_counts() -> None:
    async with talking(**QUICK) as (server, client):
        assert (await client.get("/health_generate")).status_code == 200
        assert server.server.driver.steps > 0
        assert "num_requests_total{" not in server.server.metrics.store.text().decode()


async def test_health_of_a_frozen_scheduler_is_red_after_the_timeout() -> None:
    async with talking(pacing__time_scale=1000.0) as (server, client):
        server.server.engine.freeze(1 << 62)
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ready")).status_code == 200


async def test_a_busy_scheduler_is_not_probed_its_next_batch_answers() -> None:
    async with talking(pacing__itl_ns=10_000_000) as (server, client):
        body = {"text": "x", "sampling_params": {"max_new_tokens": 10_000, "ignore_eos": True}}
        task = asyncio.ensure_future(client.post("/generate", json=body))
        await server.until(lambda: server.states() == ["decode"])
        assert (await client.get("/health")).status_code == 200
        live_ids = [view.request_id for view in server.server.engine.live()]
        recent = [entry["request_id"] for entry in server.server.history.recent(10)]
        assert not any(name.startswith("HEALTH_CHECK") for name in [*live_ids, *recent])
        task.cancel()


async def test_health_without_generation_is_a_constant() -> None:
    async with talking(sglang__health_generation=False) as (server, client):
        server.server.engine.freeze(1 << 62)
        assert (await client.get("/health")).status_code == 200


async def test_metrics_are_there_unless_switched_off() -> None:
    async with talking() as (_server, client):
        await client.post("/generate", json=BODIES["/generate"])
        text = (await client.get("/metrics")).text
        assert 'sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="wt-model"} 1.0' in text
        assert 'sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="wt-model"}' in text
    async with talking(sglang__enable_metrics=False) as (_server, client):
        assert (await client.get("/metrics")).status_code == 404


async def test_metrics_count_requests_with_a_grammar() -> None:
    async with talking() as (_server, client):
        for params in ({}, {"regex": "a+"}):
            answer = await client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 4, **params}})
            assert answer.status_code == 200
        text = (await client.get("/metrics")).text
        assert 'sglang:num_so_requests_total{engine_type="unified",model_name="wt-model"} 1.0' in text


async def test_tensor_parallel_ranks_have_metrics_of_their_own_on_request() -> None:
    async with sglang(sglang__tp_size=3) as server:
        text = server.server.metrics.store.text().decode()
        assert 'tp_rank="0"' in text
        assert 'tp_rank="1"' not in text
    async with sglang(sglang__tp_size=3, sglang__enable_metrics_for_all_schedulers=True) as server:
        assert 'tp_rank="2"' in server.server.metrics.store.text().decode()


# Operators


async def test_adapters_come_and_go() -> None:
    async with talking() as (_server, client):
        loaded = await client.post("/load_lora_adapter", json={"lora_name": "ad", "lora_path": "/ad"})
        assert (loaded.status_code, loaded.json()["loaded_adapters"]) == (200, {"ad": "/ad"})
        again = await client.post("/load_lora_adapter", json={"lora_name": "ad", "lora_path": "/ad"})
        assert (again.status_code, again.json()["success"]) == (400, False)
        assert (await client.post("/generate", json={"text": "a", "lora_path": "ad"})).status_code == 200
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["wt-model", "ad"]
        assert (await client.get("/v1/models/ad")).json()["parent"] == "wt-model"
        missing = await client.get("/v1/models/org/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/unload_lora_adapter", json={"lora_name": "ad"})).json()["loaded_adapters"] == {}


async def test_sessions_tokens_and_weights() -> None:
    async with talking() as (_server, client):
        assert (await client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "s"})).json() == "s"
        assert (await client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "s"})).status_code == 400
        for path in ("open", "close"):
            missing = await client.post(f"/{path}_session", json={"session_id": "s"} if path == "open" else {})
            assert missing.status_code == 400 and "must be" in missing.json()["message"]
        assert (await client.post("/close_session", json={"session_id": "s"})).status_code == 200
        told = (await client.post("/v1/tokenize", json={"model": "m", "prompt": "orange holly"})).json()
        assert told["count"] == len(told["tokens"])
        text = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()["text"]
        assert text == "orange holly"
        assert (await client.post("/detokenize", json={"tokens": ["x"]})).status_code == 400
        assert (await client.post("/update_weight_version", json={"new_version": "v2"})).json()["success"] is True
        answer = (await client.post("/generate", json=BODIES["/generate"])).json()
        assert answer["meta_info"]["weight_version"] == "v2"
        assert (await client.post("/update_weights_from_disk", json={"model_path": "m"})).json()["success"] is True
        count = await client.post("/v1/messages/count_tokens", json=BODIES["/v1/messages"])
        assert count.json()["input_tokens"] > 0


async def test_internal_state_and_live_settings() -> None:
    async with talking() as (server, client):
        asked = {"server_args": {"max_running_requests": 3}}
        assert (await client.post("/set_internal_state", json=asked)).json()[0]["updated"] is True
        assert server.server.engine.config.max_running_requests == 3
        assert (await client.post("/admin/config", json={"max_queued_requests": 2})).status_code == 200
        assert server.server.engine.config.max_queued_requests == 2
        refused = await client.post("/admin/config", json={"page_size": 2})
        assert (refused.status_code, "page_size" in refused.json()["message"]) == (400, True)


async def test_keys() -> None:
    settings = {"api_keys": ("user",), "sglang__admin_api_key": "root", "sglang__health_generation": False}
    async with talking(**settings) as (_server, client):
        user, root = ({"authorization": f"Bearer {key}"} for key in ("user", "root"))
        assert (await client.post("/generate", json=BODIES["/generate"])).status_code == 401
        assert (await client.post("/generate", json=BODIES["/generate"], headers=user)).status_code == 200
        assert (await client.post("/abort_request", json={}, headers=user)).status_code == 401
        assert (await client.post("/abort_request", json={}, headers=root)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_debug_requests_shows_where_a_request_is() -> None:
    async with talking(pacing__itl_ns=NEVER_NS) as (server, client):
        body = BODIES["/generate"] | {"rid": "stuck", "text": "of [wt:2a] alone"}
        task = asyncio.ensure_future(client.post("/generate", json=body))
        await server.until(lambda: server.states() == ["decode"])
        (view,) = (await client.get("/debug/requests")).json()["live"]
        assert (view["request_id"], view["state"], view["family"]) == ("stuck", "decode", "sglang_generate")
        assert view["identity"] == f"{oracle.identity_of_tag('2a'):016x}", "however it has come"
        assert view["resources"]
        task.cancel()


async def test_the_responses_api_whole_and_streamed_with_nested_errors() -> None:
    async with sglang() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        whole = await client.responses.create(model="m", input=TEXT, max_output_tokens=5)
        assert whole.output_text == oracle_text(5)
        kinds = []
        text = ""
        async with client.responses.stream(model="m", input=TEXT, max_output_tokens=5) as stream:
            async for event in stream:
                kinds.append(event.type)
                text += event.delta if event.type == "response.output_text.delta" else ""
        assert kinds[0] == "response.created"
        assert text == oracle_text(5)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input=TEXT, background=True)
        assert {"message", "type", "param", "code"} <= caught.value.body.keys()
