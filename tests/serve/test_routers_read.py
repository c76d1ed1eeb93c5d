"""What routers, gateways and autoscalers read of a worker's `/metrics`: it is there, has its type, and moves as they think.

From their own sources: llm-d's inference scheduler (`extractor/metrics/factories.go`), smg (`worker/monitor.rs`), aibrix
(`pkg/metrics/metrics.go`), vLLM's production stack (`engine_stats.py`, its KEDA recipe). What they read and the release
does not have is in `GONE`: a server of that release does not show it, and neither do we.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.live import PATIENCE_S, LiveServer, live

BUSY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:num_used_tokens",
)
"""Above zero while one request decodes and one waits, and zero when both are gone."""
GAUGES = (
    "vllm:engine_sleep_state",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:utilization",
    "sglang:num_retracted_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:max_total_num_tokens",
    "sglang:page_size",
    "sglang:num_pages",
)
COUNTERS = (
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "sglang:num_requests",
    "sglang:prompt_tokens",
    "sglang:generation_tokens",
)
HISTOGRAMS = (
    "http_request_duration_seconds",
    "http_request_duration_highr_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:iteration_tokens_total",
    "sglang:e2e_request_latency_seconds",
    "sglang:per_stage_req_latency_seconds",
    "sglang:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds",
)
"""Each has an observation once a request of several tokens has ended."""
GONE = (
    "vllm:gpu_cache_usage_perc",
    "vllm:cpu_cache_usage_perc",
    "vllm:num_requests_swapped",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:time_per_output_token_seconds",
    "vllm:avg_prompt_throughput_toks_per_s",
    "sglang:cache_config_info",
    "sglang:num_prefill_prealloc_queue_reqs",
    "sglang:time_per_output_token_seconds",
)
LABELS = {
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:request_success": {"model_name", "engine", "finished_reason"},
    "sglang:num_queue_reqs": {"model_name", "engine_type", "tp_rank", "pp_rank"},
    "sglang:per_stage_req_latency_seconds": {"stage"},
}
BODY: dict[str, Any] = {"prompt": "storm [wt:7]", "max_tokens": 5, "ignore_eos": True}
SLOW = {"pacing__itl_ns": 100_000_000}
SERVERS: dict[str, dict[str, Any]] = {
    "vllm": {"enable_lora": True, "scheduler__max_num_seqs": 1},
    "sglang": {"sglang__max_running_requests": 1, "sglang__max_total_tokens": 256, "sglang__decode_log_interval": 1},
}


def client_of(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)


async def scraped(client: httpx.AsyncClient) -> dict[str, Any]:
    """Families by name."""
    answer = await client.get("/metrics")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def total(families: dict[str, Any], name: str, suffix: str = "") -> float:
    return float(sum(sample.value for sample in families[name].samples if sample.name == name + suffix))


def of(engine: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{engine}:") or (engine == "vllm" and name.startswith("http_"))]


@pytest.mark.parametrize("engine", SERVERS)
async def test_what_is_read_is_there_with_its_type_and_labels_and_moves(engine: str) -> None:
    async with live(engine=engine, **SERVERS[engine]) as server, client_of(server) as client:
        assert (await client.post("/v1/completions", json=BODY | {"model": server.server.config.model})).status_code == 200
        told = await scraped(client)
        for kind, names in (("gauge", (*BUSY, *GAUGES)), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
            assert {name: told[name].type for name in of(engine, names)} == dict.fromkeys(of(engine, names), kind)
        assert not set(of(engine, GONE)) & set(told)
        for name, labels in LABELS.items():
            if name in told:
                assert all(labels <= set(sample.labels) for sample in told[name].samples), name
        assert all(total(told, name, "_count") > 0 for name in of(engine, HISTOGRAMS))
        moved = [name for name in of(engine, COUNTERS) if name.endswith(("tokens", "success", "num_requests"))]
        assert all(total(told, name, "_total") > 0 for name in moved)


@pytest.mark.parametrize("engine", SERVERS)
async def test_the_load_shows_while_it_lasts_and_not_after(engine: str) -> None:
    async with live(engine=engine, **SERVERS[engine], **SLOW) as server, client_of(server) as client:
        asked = BODY | {"model": server.server.config.model, "max_tokens": 200, "stream": True}
        working = [asyncio.ensure_future(client.post("/v1/completions", json=asked)) for _ in range(2)]
        await server.until(lambda: sorted(server.states()) == ["decode", "queued"])
        await server.until(lambda: all(server.gauge(name) > 0 for name in of(engine, BUSY)))
        if engine == "sglang":  # whose queue gauge would stand still for 30 s after the last one waiting has left by itself
            assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        for one in working:
            one.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await server.until(lambda: not server.states())
        await server.until(lambda: not any(server.gauge(name) for name in of(engine, BUSY)))
