"""`VllmMetrics` fed by the real engine: a crowd on a small pool, with preemptions and clients that leave."""

from collections.abc import Sequence

import pytest

from windtunnel.core.outputs import TokenOutput
from windtunnel.core.pacing import StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import MS
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.engine import VllmEngine
from windtunnel.wire.metrics import Histogram, Value
from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.metrics import VllmMetrics

PROMPT, OUTPUT = 24, 40


class Words:
    def token_ids(self, start: int, count: int) -> Sequence[int]:
        return range(start, start + count)


class Server:
    """An engine in virtual time and the metrics over it. Owns both."""

    def __init__(self, num_blocks: int) -> None:
        config = VllmEngineConfig(
            num_blocks=num_blocks, block_size=8, max_model_len=64, max_num_seqs=8, enable_prefix_caching=False
        )
        self.engine = VllmEngine(config, StepPacing(base_ns=MS, prefill_token_ns=0, decode_seq_ns=0))
        labels = cache_config_labels(block_size=8, num_gpu_blocks=num_blocks, max_model_len=64)
        self.metrics = VllmMetrics("m", [0], 64, labels, lambda: 0.0)
        self.now_ns = 0

    def submit(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            prompt = tuple(range(1000 * number, 1000 * number + PROMPT))
            request = EngineRequest(name, prompt, Words(), max_tokens=OUTPUT, arrival_ns=self.now_ns)
            assert self.engine.submit([request], self.now_ns) is None
            self.metrics.on_submitted(0, [request])

    def run(self, steps: int = 10_000) -> None:
        """Until the engine is idle, or so many events."""
        for _ in range(steps):
            due = self.engine.next_event_at()
            if due is None:
                return
            self.now_ns = max(self.now_ns, due)
            for step in self.engine.advance(self.now_ns):
                self.metrics.on_step(0, step, self.now_ns)
                for output in step.outputs:
                    self.take(output)

    def take(self, output: TokenOutput) -> None:
        if output.finish_reason is not None:
            self.metrics.on_finished(output.request_id, output.finish_reason, self.now_ns)

    def leave(self, names: Sequence[str]) -> None:
        self.metrics.on_dropped(names)
        self.engine.abort(names, self.now_ns)

    def value(self, name: str, *labels: str) -> float:
        child = self.metrics.store.family(f"vllm:{name}").child("m", "0", *labels)
        assert isinstance(child, Value)
        return child.value

    def histogram(self, name: str) -> Histogram:
        child = self.metrics.store.family(f"vllm:{name}").child("m", "0")
        assert isinstance(child, Histogram)
        return child


def test_a_crowd_that_stays() -> None:
    server = Server(num_blocks=30)
    names = [f"r{number}" for number in range(12)]
    server.submit(names)
    server.run()
    assert server.value("request_success", "length") == len(names)
    assert server.value("prompt_tokens") == len(names) * PROMPT
    assert server.value("generation_tokens") == len(names) * OUTPUT == server.histogram("request_generation_tokens").sum
    assert server.value("num_preemptions") == server.histogram("request_num_preemptions").sum > 0
    decode_s = server.histogram("request_decode_time_seconds").sum
    assert server.histogram("inter_token_latency_seconds").sum == pytest.approx(decode_s)
    assert server.histogram("iteration_tokens_total").sum == len(names) * (PROMPT + OUTPUT)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.value(gauge) == 0
    assert list(server.metrics.live()) == []


def test_a_storm_of_leavers() -> None:
    server = Server(num_blocks=30)
    names = [f"r{number}" for number in range(12)]
    server.submit(names)
    server.run(steps=25)
    assert server.value("num_requests_running") > 0
    assert server.value("num_requests_waiting") > 0
    before = server.value("generation_tokens"), server.value("prompt_tokens")
    server.leave(names)
    server.run()
    assert (server.value("generation_tokens"), server.value("prompt_tokens")) == before
    assert server.histogram("e2e_request_latency_seconds").count == 0
    assert server.value("request_success", "abort") == 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.value(gauge) == 0
    assert list(server.metrics.live()) == []
