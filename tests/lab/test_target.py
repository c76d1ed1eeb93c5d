"""Kinds and gauges, read from metrics texts."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from windtunnel.lab.target import (
    KINDS,
    UNKNOWN,
    gauges_of,
    make_target,
    not_numbers,
    parse_metrics,
    read_counters,
    read_gauges,
    recognise,
)

GOLDEN = Path(os.environ.get("WINDTUNNEL_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "vllm"

SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 3.0
sglang:num_queue_reqs{tp_rank="0"} 2.0
sglang:token_usage{tp_rank="0"} 0.25
sglang:num_prefill_inflight_queue_reqs{tp_rank="0"} 11.0
sglang:num_transfer_failed_reqs_total{tp_rank="0"} 10.0
"""


def read(text: str) -> tuple[str, dict[str, float], dict[str, float]]:
    series = parse_metrics(text)
    kind = recognise(series)
    return kind.name, read_gauges(series, gauges_of(kind, ())), read_counters(series, kind.counters)


@pytest.mark.parametrize("text", [SGLANG, SGLANG.replace("sglang:", "sglang_")])
def test_sglang(text: str) -> None:
    kind, gauges, counters = read(text)
    assert kind == "sglang"
    assert gauges == {"running": 3, "waiting": 2, "kv_usage": 0.25, "num_prefill_inflight_queue_reqs": 11}
    assert counters == {"num_transfer_failed_reqs": 10, "transfer_failed_by_rank{,0}": 10}


def test_engines_are_added_up_and_usages_are_not() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}"}} {rank + 1}\nvllm:kv_cache_usage_perc{{engine="{rank}"}} 0.{rank + 1}\n'
        for rank in range(2)
    )
    assert read(text)[1] == {"running": 3, "kv_usage": 0.2}


def test_headers_stay_on_the_targets_host() -> None:
    headers = {"authorization": "Bearer secret"}
    urls = ["http://127.0.0.1:2/metrics", "http://localhost:3", "http://10.0.0.1:1/metrics"]
    target = make_target("http://127.0.0.1:1", "m", headers=headers, metrics_urls=urls)
    assert [target.headers_for(url.origin) for url in target.metrics] == [headers, headers, {}]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_number_is_missing(value: str) -> None:
    text = SGLANG.replace('num_running_reqs{tp_rank="0"} 3.0', f'num_running_reqs{{tp_rank="0"}} {value}')
    kind, gauges, _ = read(text)
    assert gauges.keys() == {"waiting", "kv_usage", "num_prefill_inflight_queue_reqs"}
    series = parse_metrics(text)
    assert not_numbers(series, gauges_of(recognise(series), ())) == {"sglang:num_running_reqs"}
    assert kind == "sglang"


def test_counters_split_by_label() -> None:
    name = "vllm:request_success_total"
    text = f'{name}{{finished_reason="stop",engine="0"}} 2\n{name}{{finished_reason="abort"}} 1\n'
    assert read(text)[2] == {"request_success{stop}": 2, "request_success{abort}": 1}


def test_watched_gauges_of_an_unknown_server() -> None:
    series = parse_metrics('my_busy_slots{x="a \\" } b"} 4 1700000000\nnonsense line\n')
    assert recognise(series) is UNKNOWN
    assert read_gauges(series, gauges_of(UNKNOWN, ["my_busy_slots", "absent"])) == {"my_busy_slots": 4}


PAGES = Path(__file__).with_name("pages")
ENGINES = {"running": 3, "waiting": 2, "kv_usage": 0.25}
ROUTER = {"router_active": 3}
GAUGES = {
    "vllm": ENGINES,
    "sglang": ENGINES,
    "tensorrt-llm": {"running": 5, "kv_usage": 0.25},
    "trtllm-serve": ENGINES,
    "llm-d-inference-sim": ENGINES,
    "tgi": {"running": 3, "waiting": 2},
    "llama.cpp": {"running": 3, "waiting": 2},
    "dynamo": {**ROUTER, "router_waiting": 0},
    "litellm": {"router_active": 7},
    "smg": {"router_active": 6},
    "smg@sglang-router-0.3.2": {"router_active": 6},
    "sglang-router": ROUTER,
    "vllm-router": {"router_active": 6},
}
COUNTERS = {
    "tgi": {"request_success": 5, "request_failure{overloaded}": 1, "request_failure{dropped}": 2},
    "llama.cpp": {"generation_tokens": 41, "prompt_tokens": 12},
    "dynamo": {"router_requests{success,}": 1, "router_requests{error,validation}": 1, "router_tokens": 114},
    "litellm": {"router_requests{200}": 3, "router_requests{400}": 1, "router_failures": 1},
    "smg": {"router_responses{200}": 4, "router_responses{400}": 1, "router_retries": 0},
    "smg@sglang-router-0.3.2": {"router_responses{200}": 6, "router_responses{400}": 1},
    "sglang-router": {"router_requests": 5, "router_retries": 1},
    "vllm-router": {"router_requests": 9},
    "llm-d-inference-sim": {"generation_tokens": 41, "finished{length}": 5},
    "trtllm-serve": {"request_success{length}": 5, "prompt_tokens": 12, "generation_tokens": 41},
}


@pytest.mark.parametrize("page", sorted(page.name.removesuffix(".txt") for page in PAGES.glob("*.txt")))
def test_each_kind_is_recognised_by_its_pages(page: str) -> None:
    """`kind@other` is the page of another program that counts as the kind."""
    name, gauges, counters = read((PAGES / f"{page}.txt").read_text())
    assert (name, gauges) == (page.partition("@")[0], GAUGES[page])
    assert counters == COUNTERS.get(page, counters)


def test_every_kind_has_a_page() -> None:
    assert {page.name.removesuffix(".txt").partition("@")[0] for page in PAGES.glob("*.txt")} == {kind.name for kind in KINDS}


def test_what_triton_says_after_its_last_step_is_not_taken_for_work_in_progress() -> None:
    """Its gauges are those of the engine's last iteration, which may have scheduled what has ended since."""
    page = (PAGES / "tensorrt-llm.txt").read_text()
    for kind, value in (("active", 0), ("scheduled", 3), ("waiting", -3)):
        page = re.sub(rf'(request_type="{kind}".*) .*', rf"\1 {value}", page)
    assert read(page)[1] == {"running": 0, "kv_usage": 0.25}


def test_a_router_without_loads_of_its_workers_is_watched_by_the_requests_it_serves() -> None:
    """sglang-router 0.3.2 has `smg_worker_requests_active` only under policies that look at loads."""
    page = (PAGES / "smg@sglang-router-0.3.2.txt").read_text()
    kept = "\n".join(line for line in page.splitlines() if not line.startswith("smg_worker_requests_active"))
    assert read(kept)[1] == {"router_active": 4}


def test_a_routers_requests_are_not_added_to_its_workers() -> None:
    pages = [read((PAGES / f"{kind}.txt").read_text())[1] for kind in ("smg", "vllm", "vllm")]
    total = Counter[str]()
    for gauges in pages:
        total.update(gauges)
    assert (total["running"], total["router_active"]) == (6, 6)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden recordings of a real vLLM (WINDTUNNEL_GOLDEN)")
def test_metrics_of_a_real_vllm() -> None:
    kind, gauges, counters = read((GOLDEN / "metrics_after.txt").read_text("utf-8"))
    assert kind == "vllm"
    assert gauges.keys() == {"running", "waiting", "kv_usage"}
    assert counters["generation_tokens"] > 0
    assert counters["request_success{abort}"] == 0


def test_a_line_that_has_not_changed_is_not_read_again() -> None:
    one, two = parse_metrics('a{x="1"} 4\nb 1\n'), parse_metrics('b 2\na{x="1"} 4\n')
    assert two[1] is one[0]
    assert [(series.name, series.value) for series in two] == [("b", 2.0), ("a", 4.0)]
    with pytest.raises(TypeError):
        two[1].labels["x"] = "2"  # type: ignore[index]  # they are shared
