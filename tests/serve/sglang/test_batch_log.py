"""The scheduler's log lines: what they say, and when a server writes them."""

import logging
import re

import pytest
from tests.serve.live import PATIENCE_S
from tests.serve.sglang_live import sglang

from windtunnel.core.lifecycle import Event, State, Transition
from windtunnel.core.outputs import StepOutput, StepStats, TokenOutput
from windtunnel.serve.sglang.batch_log import BatchLog

GAUGES = {"num_used_tokens": 300, "gen_throughput": 12.5}
TOKENS = [TokenOutput("a", (1,))]
ADMITTED = [Transition(0, name, Event.SCHEDULE, State.QUEUED, State.PREFILL) for name in "ab"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " batch, " in record.getMessage()]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "windtunnel.serve")
    return caplog


def test_a_prefill_line(told: pytest.LogCaptureFixture) -> None:
    observer = BatchLog()
    stats = StepStats(3, 2, 0, 0.125, prefill_tokens=100, prefix_hits=50, extra=GAUGES)
    observer.on_step(0, StepOutput(10**9, transitions=ADMITTED, stats=stats), 0)
    observer.on_step(0, StepOutput(3 * 10**9, stats=stats), 0)
    first = (
        "Prefill batch, #new-seq: 2, #new-token: 100, #cached-token: 50, token usage: 0.12, #running-req: 3, #queue-req: 2, "
        "input throughput (token/s): 0.00"
    )
    assert lines(told) == [first, first.replace("#new-seq: 2", "#new-seq: 1").replace("0.00", "50.00")]


def test_decode_lines_of_a_unified_and_of_a_decode_worker(told: pytest.LogCaptureFixture) -> None:
    queues = {"num_decode_prealloc_queue_reqs": 1, "num_decode_transfer_queue_reqs": 2, "decode_retracted_queue_reqs": 3}
    for extra in (GAUGES | {"num_retracted_reqs": 9}, GAUGES | queues):
        BatchLog().on_step(0, StepOutput(0, TOKENS, stats=StepStats(4, 5, 0, 0.5, decode_tokens=160, extra=extra)), 0)
    start, end = (
        "Decode batch, #running-req: 4, #token: 300, token usage: 0.50",
        "gen throughput (token/s): 12.50, #queue-req: 5",
    )
    assert lines(told) == [f"{start}, {end}", f"{start}, #prealloc-req: 1, #transfer-req: 2, #retracted-req: 3, {end}"]


@pytest.mark.parametrize(("stem", "shown"), [("bootstrap", "#bootstrap-req"), ("prealloc", "#prealloc-req")])
def test_a_prefill_workers_queues_have_the_names_of_its_release(told: pytest.LogCaptureFixture, stem: str, shown: str) -> None:
    extra = GAUGES | {f"num_prefill_{stem}_queue_reqs": 6, "num_prefill_inflight_queue_reqs": 7}
    BatchLog().on_step(0, StepOutput(0, stats=StepStats(0, 1, 0, 0.0, prefill_tokens=8, extra=extra)), 0)
    assert f"#queue-req: 1, {shown}: 6, #inflight-req: 7, input throughput" in lines(told)[0]


def test_an_idle_report_and_a_step_without_one_say_nothing(told: pytest.LogCaptureFixture) -> None:
    for stats in (StepStats(0, 0, 0, 0.0, decode_tokens=7, extra=GAUGES), None):
        BatchLog().on_step(0, StepOutput(0, stats=stats), 0)
    assert not lines(told)


@pytest.mark.parametrize("on", [True, False])
async def test_a_server_logs_its_batches_when_asked(told: pytest.LogCaptureFixture, on: bool) -> None:
    import httpx

    async with (
        sglang(sglang__log_batches=on, sglang__decode_log_interval=10) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        body = {"text": "hello [wt:7]", "sampling_params": {"max_new_tokens": 25, "ignore_eos": True}}
        assert (await client.post("/generate", json=body)).status_code == 200
        said = lines(told)
        assert len(said) == (3 if on else 0)
        if on:
            assert re.match(r"Prefill batch, #new-seq: 1, #new-token: \d+, #cached-token: 0, ", said[0])
            assert all(line.startswith("Decode batch, #running-req: 1, #token: ") for line in said[1:])
