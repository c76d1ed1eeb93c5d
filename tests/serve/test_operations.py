"""What operators do, seen by clients (vLLM reference §1.4, §3.8)."""

import json
from typing import Any

import pytest
from tests.serve.golden import split
from tests.serve.live import FOREVER_NS, LiveServer, RawClient, live, request_bytes

from windtunnel.serve.clock import now_ns
from windtunnel.wire.metrics import render

BODY = {"model": "wt-model", "prompt": "storm [wt:7]", "max_tokens": 50, "ignore_eos": True}
SLOW = {"dev_mode": True, "pacing__itl_ns": FOREVER_NS}


async def call(server: LiveServer, method: str, path: str, body: Any = None, extra: str = "") -> tuple[int, Any]:
    client = await RawClient.connect(server.port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    client.send(head.encode() + f"{extra}Connection: close\r\n\r\n".encode() + data)
    status, headers, answer = split(await client.read_all())
    is_json = dict(headers).get("content-type") == "application/json"
    return status, json.loads(answer) if is_json and answer else answer


async def start(server: LiveServer, *, stream: bool, request_id: str = "", path: str = "/v1/completions") -> RawClient:
    """A request that has given its first token and will not give another."""
    before = len(server.states())
    client = await RawClient.connect(server.port)
    extra = "Connection: close\r\n" + (f"X-Request-Id: {request_id}\r\n" if request_id else "")
    client.send(request_bytes(path, BODY | {"stream": stream}, extra=extra))
    await server.until(lambda: server.states().count("decode") == before + 1)
    return client


def end_in_the_engine(server: LiveServer) -> None:
    """Every request reaches its end, as the engine sees it."""
    server.server.engine.abort([view.request_id for view in server.server.engine.live()], now_ns(), notify=True)
    server.server.driver.wake()


def success(server: LiveServer) -> float:
    return server.gauge("vllm:request_success_total")


@pytest.mark.parametrize(
    ("method", "path", "body", "counted"),
    [
        ("POST", "/pause?mode=abort", None, 1),
        ("POST", "/sleep?level=1", None, 1),
        ("POST", "/abort_requests", {"request_ids": []}, 0),
        ("POST", "/abort_requests", {"request_ids": ["cmpl-r1-0"]}, 0),
    ],
    ids=["pause", "sleep", "abort all", "abort by id"],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_ended_by_the_operator(method: str, path: str, body: Any, counted: int, stream: bool) -> None:
    async with live(**SLOW) as server:
        client = await start(server, stream=stream, request_id="r1")
        status, answer = await call(server, method, path, body)
        assert status == 200
        assert answer in ({"status": "paused"}, {"status": "sleeping", "level": 1}, {"status": "aborted", "aborted": 1})
        text = await client.read_all()
        assert text.count(b'"finish_reason":"abort"') == 1
        assert text.startswith(b"HTTP/1.1 200 OK")
        assert (b"data: [DONE]" in text) is stream
        await server.until(lambda: not server.states() and not server.server.jobs)
        assert success(server) == counted
        server.server.engine.check_integrity()


@pytest.mark.parametrize("request_ids", [["cmpl-r1"], ["r1"], ["unknown"], ["cmpl-r1-1"]])
async def test_other_ids_match_nothing_and_are_counted_in_the_answer(request_ids: list[str]) -> None:
    async with live(**SLOW, enable_scale_out=True) as server:
        client = await start(server, stream=True, request_id="r1")
        assert await call(server, "POST", "/abort_requests", {"request_ids": request_ids}) == (
            200,
            {"status": "aborted", "aborted": 1},
        )
        assert await call(server, "POST", "/inference/v1/abort_requests", {"request_ids": request_ids}) == (200, b"")
        assert await call(server, "POST", "/inference/v1/abort_requests", {"request_ids": []}) == (200, b"")
        assert server.states() == ["decode"]
        client.leave("fin")


async def test_scale_out_abort_takes_the_indexed_id() -> None:
    async with live(**SLOW, enable_scale_out=True) as server:
        client = await start(server, stream=True, request_id="r1")
        assert await call(server, "POST", "/inference/v1/abort_requests", {"request_ids": ["cmpl-r1-0"]}) == (200, b"")
        assert b'"finish_reason":"abort"' in await client.read_all()


async def test_a_paused_server_refuses_by_status_and_inside_a_stream() -> None:
    async with live(dev_mode=True) as server:
        assert await call(server, "POST", "/pause") == (200, {"status": "paused"})
        assert await call(server, "GET", "/is_paused") == (200, {"is_paused": True})
        status, answer = await call(server, "POST", "/v1/completions", BODY)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "ServiceUnavailableError", 503)
        status, answer = await call(server, "POST", "/v1/completions", BODY | {"stream": True})
        assert status == 200
        assert answer.count(b"ServiceUnavailableError") == 1
        assert answer.count(b"[DONE]") == 1
        assert b"choices" not in answer
        assert (await call(server, "GET", "/health"))[0] == 200
        assert await call(server, "POST", "/resume") == (200, {"status": "resumed"})
        assert (await call(server, "POST", "/v1/completions", BODY))[0] == 200


async def test_pause_keep_freezes_and_takes_new_requests() -> None:
    async with live(dev_mode=True, pacing__ttft_ns=FOREVER_NS) as server:
        assert await call(server, "POST", "/pause?mode=keep") == (200, {"status": "paused"})
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/completions", BODY | {"stream": True}, extra="Connection: close\r\n"))
        await server.until(lambda: server.states() == ["queued"])
        server.server.reconfigure({"ttft": "0"})
        await server.until(lambda: server.published() == 1)
        assert server.states() == ["queued"]
        assert await call(server, "POST", "/resume") == (200, {"status": "resumed"})
        assert (await client.read_all()).count(b"[DONE]") == 1


@pytest.mark.parametrize("path", ["/pause?mode=wait", "/sleep?mode=wait"])
async def test_pause_wait_returns_when_the_last_request_has_ended(path: str) -> None:
    async with live(**SLOW) as server:
        client = await start(server, stream=True)
        waiting = await RawClient.connect(server.port)
        waiting.send(f"POST {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        await server.until(lambda: server.server.engine.control.paused == "wait")
        status, answer = await call(server, "POST", "/v1/completions", BODY)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        assert server.states() == ["decode"]
        end_in_the_engine(server)
        assert (await client.read_all()).count(b'"finish_reason":"abort"') == 1
        assert split(await waiting.read_all())[0] == 200
        assert success(server) == 1


async def test_resume_ends_a_pause_that_still_waits() -> None:
    async with live(**SLOW) as server:
        client = await start(server, stream=True)
        waiting = await RawClient.connect(server.port)
        waiting.send(b"POST /pause?mode=wait HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        await server.until(lambda: server.server.engine.control.paused == "wait")
        assert await call(server, "POST", "/resume") == (200, {"status": "resumed"})
        assert split(await waiting.read_all())[0] == 200
        assert server.states() == ["decode"]
        client.leave("fin")


async def test_sleep_levels_and_the_metric() -> None:
    async with live(dev_mode=True) as server:
        for level, state in ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all")):
            assert await call(server, "POST", f"/sleep?level={level}") == (200, {"status": "sleeping", "level": level})
            assert sleep_state(server) == state
            assert await call(server, "POST", "/wake_up") == (200, {"status": "awake", "tags": None})
            assert sleep_state(server) == "awake"
        await call(server, "POST", "/sleep")
        assert await call(server, "POST", "/wake_up?tags=weights") == (200, {"status": "sleeping", "tags": ["weights"]})
        assert await call(server, "POST", "/wake_up?tags=kv_cache") == (200, {"status": "awake", "tags": ["kv_cache"]})


async def test_sleep_operations_are_timed_from_the_first_one_on() -> None:
    """vLLM 0.33, `entrypoints/serve/dev/sleep/metrics.py`: the series begin with the first operation."""
    async with live(dev_mode=True) as server:
        assert "sleep_mode" not in render(server.server.metrics.store).decode()
        for path in ("/sleep", "/wake_up", "/wake_up", "/release_kv_cache_memory"):
            assert (await call(server, "POST", path))[0] == 200
        for operation, times in (("sleep", 1), ("wake", 2), ("release_kv_cache_memory", 1)):
            assert server.gauge("vllm:sleep_mode_operation_duration_seconds_count", operation=operation) == times
            assert server.gauge("vllm:sleep_mode_operations_in_flight", operation=operation) == 0
        assert await call(server, "POST", "/release_kv_cache_memory") == (200, {"status": "kv_cache_released"})


async def test_a_sleep_that_waits_is_in_flight() -> None:
    async with live(**SLOW) as server:
        client = await start(server, stream=True)
        waiting = await RawClient.connect(server.port)
        waiting.send(b"POST /sleep?mode=wait HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        await server.until(lambda: server.server.engine.control.paused == "wait")
        assert server.gauge("vllm:sleep_mode_operations_in_flight", operation="sleep") == 1
        await call(server, "POST", "/resume")
        assert split(await waiting.read_all())[0] == 200
        assert server.gauge("vllm:sleep_mode_operations_in_flight", operation="sleep") == 0
        client.leave("fin")


def sleep_state(server: LiveServer) -> str:
    family = server.server.metrics.store.family("vllm:engine_sleep_state")
    (name,) = [s.labels["sleep_state"] for s in family.metric(family.children).samples if s.value == 1]
    return str(name)


async def test_the_prefix_cache_is_not_reset_while_it_is_in_use() -> None:
    async with live(**SLOW) as server:
        client = await start(server, stream=True)
        assert await call(server, "POST", "/reset_prefix_cache") == (200, {"success": False})
        client.leave("fin")
        await server.until(lambda: not server.states())
        assert await call(server, "POST", "/reset_prefix_cache") == (200, {"success": True})


@pytest.mark.parametrize(
    "path",
    [
        "/pause?mode=soon",
        "/sleep?level=3",
        "/sleep?level=-1",
        "/sleep?mode=x",
        "/reset_prefix_cache?reset_running_requests=perhaps",
    ],
)
async def test_bad_queries_name_the_parameter(path: str) -> None:
    async with live(dev_mode=True) as server:
        status, answer = await call(server, "POST", path)
        assert status == 400
        assert answer["error"]["param"].removeprefix("query.") in path


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/pause", {}),
        ("/start_profile", {}),
        ("/v1/load_lora_adapter", {}),
        ("/tokenizer_info", {}),
        ("/start_profile", {"dev_mode": True}),
        ("/v1/load_lora_adapter", {"dev_mode": True}),
    ],
)
async def test_conditional_routes_do_not_exist_without_their_condition(path: str, options: dict[str, Any]) -> None:
    async with live(**options) as server:
        assert await call(server, "POST", path) == (404, {"detail": "Not Found"})


async def test_profiler_conflicts() -> None:
    async with live(profiler_config="{}") as server:
        assert (await call(server, "POST", "/stop_profile"))[0] == 409
        assert (await call(server, "POST", "/start_profile"))[0] == 200
        assert (await call(server, "POST", "/start_profile"))[0] == 409
        assert (await call(server, "POST", "/stop_profile"))[0] == 200


async def test_weight_updates_in_the_small() -> None:
    async with live(dev_mode=True) as server:
        assert (await call(server, "POST", "/update_weights", {}))[0] == 400
        for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            assert (await call(server, "POST", f"/{path}", {}))[0] == 200
        assert (await call(server, "POST", "/finish_weight_update", {}))[0] == 400
        assert (await call(server, "POST", "/update_weight_version", {"weight_version": "v2"}))[0] == 200
        assert await call(server, "GET", "/weight_info") == (200, {"weight_version": "v2"})


async def test_server_info_as_text_and_nested() -> None:
    async with live(dev_mode=True, api_keys=("secret-key",)) as server:
        _, text = await call(server, "GET", "/server_info")
        _, nested = await call(server, "GET", "/server_info?config_format=json")
        assert "model='wt-model'" in text["vllm_config"]
        assert nested["vllm_config"]["scheduler"]["block_size"] == 16
        assert "secret-key" not in json.dumps([text, nested])


async def test_an_adapter_loaded_at_run_time_answers() -> None:
    async with live(runtime_lora=True) as server:
        assert (await call(server, "POST", "/v1/completions", BODY | {"model": "late"}))[0] == 404
        assert (await call(server, "POST", "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": "/adapters/late"}))[
            0
        ] == 200
        status, answer = await call(server, "POST", "/v1/completions", BODY | {"model": "late"})
        assert (status, answer["model"]) == (200, "late")
        assert "late" in [card["id"] for card in (await call(server, "GET", "/v1/models"))[1]["data"]]
        assert (await call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "late"}))[0] == 200
        assert (await call(server, "POST", "/v1/completions", BODY | {"model": "late"}))[0] == 404


async def test_load_counts_only_with_its_flag_and_falls_on_disconnect() -> None:
    for tracking in (True, False):
        async with live(**SLOW, enable_server_load_tracking=tracking) as server:
            client = await start(server, stream=True)
            assert await call(server, "GET", "/load") == (200, {"server_load": int(tracking)})
            client.leave("rst")
            await server.until(lambda: not server.states() and not server.server.jobs)
            assert await call(server, "GET", "/load") == (200, {"server_load": 0})


async def test_metrics_show_the_process_first() -> None:
    async with live() as server:
        _, text = await call(server, "GET", "/metrics")
        names = [line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")]
        assert names[0] == "python_gc_objects_collected_total"
        assert names.index("process_open_fds") < names.index("vllm:num_requests_running")
