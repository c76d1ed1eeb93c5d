"""The series of `VllmMetrics` against those of a recorded vLLM 0.32 server: names, types, labels, buckets and order."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import generate_latest

from windtunnel.core.outputs import StepOutput, StepStats
from windtunnel.wire.metrics import CONTENT_TYPE, process_metrics, render
from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.metrics import VllmMetrics

GOLDEN = Path(os.environ.get("WINDTUNNEL_GOLDEN") or Path(__file__).parents[3] / "shared" / "golden") / "vllm"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no recordings at {GOLDEN}; set WINDTUNNEL_GOLDEN")

OF_THE_PROCESS = re.compile(r"(python|process)_")
"""Exception 1: the values of these (and the version labels of python_info) belong to the process that was recorded."""
CREATED = re.compile(r"_created$")
"""Exception 2: the values are times of the recording."""

_SAMPLE = re.compile(r"^([^\s{]+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    @property
    def series(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.name, () if self.name == "python_info" else self.labels

    @property
    def comparable(self) -> bool:
        return not (OF_THE_PROCESS.match(self.name) or CREATED.search(self.name))


class Text(NamedTuple):
    types: list[str]
    samples: list[Sample]


def parse(text: str) -> Text:
    lines = text.splitlines()
    samples = []
    for line in lines:
        if not line.startswith("#"):
            match = _SAMPLE.match(line)
            assert match, line
            samples.append(Sample(match[1], tuple(_LABEL.findall(match[2] or "")), float(match[3])))
    return Text([line for line in lines if line.startswith("# TYPE")], samples)


def recorded(name: str) -> Text:
    return parse((GOLDEN / name).read_text(encoding="utf-8"))


def fresh() -> VllmMetrics:
    """A server with the configuration of the recording."""
    cache = cache_config_labels(
        block_size=32,
        num_gpu_blocks=320,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=320,
        user_specified_block_size=True,
    )
    return VllmMetrics("tiny-llama", [0], 2048, cache, lambda: 1.795e9, max_loras=1)


def shown(metrics: VllmMetrics) -> Text:
    return parse(render(process_metrics(), metrics.store).decode())


def assert_same_series(ours: Text, theirs: Text) -> None:
    assert ours.types == theirs.types
    assert [sample.series for sample in ours.samples] == [sample.series for sample in theirs.samples]


def test_a_fresh_server_shows_exactly_the_recorded_series() -> None:
    ours, theirs = shown(fresh()), recorded("metrics_before.txt")
    assert_same_series(ours, theirs)
    assert [s for s in ours.samples if s.comparable] == [s for s in theirs.samples if s.comparable]


def replay_http(metrics: VllmMetrics, theirs: Text) -> None:
    """The recorded requests, grouped by handler, method and status: the counters do not say their order, the series do."""
    for sample in theirs.samples:
        if sample.name == "http_requests_total":
            labels = dict(sample.labels)
            for _ in range(int(sample.value)):
                metrics.on_http(labels["handler"], labels["method"], int(labels["status"][0]) * 100, 0.01, 0, 0)


def step_with_loras(waiting: tuple[str, ...], running: tuple[str, ...]) -> StepOutput:
    return StepOutput(0, stats=StepStats(0, 0, 0, 0.0, waiting_loras=waiting, running_loras=running))


def replay_loras(metrics: VllmMetrics, theirs: Text) -> None:
    for sample in theirs.samples:
        if sample.name == "vllm:lora_requests_info":
            labels = dict(sample.labels)
            names = [tuple(filter(None, labels[f"{kind}_lora_adapters"].split(","))) for kind in ("waiting", "running")]
            metrics.on_step(0, step_with_loras(names[0], names[1]), 0)


def test_a_used_server_shows_exactly_the_recorded_series() -> None:
    theirs, metrics = recorded("metrics_after.txt"), fresh()
    replay_http(metrics, theirs)
    replay_loras(metrics, theirs)
    ours = shown(metrics)
    assert_same_series(ours, theirs)
    counted = re.compile(r"http_.*(_total|_count)$")
    assert [s for s in ours.samples if counted.match(s.name)] == [s for s in theirs.samples if counted.match(s.name)]


def test_the_fast_text_is_the_library_s() -> None:
    metrics = fresh()
    replay_http(metrics, recorded("metrics_after.txt"))
    assert render(metrics.store) == generate_latest(metrics.store)


def test_content_type_is_the_recorded_one() -> None:
    assert f'"{CONTENT_TYPE}"' in (GOLDEN / "metrics_headers.json").read_text(encoding="utf-8")
