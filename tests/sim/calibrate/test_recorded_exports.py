"""The readers on what the tools really wrote (`tests/data/calibrate`), and a fit to them finds the server that was measured.

That server: 40 ms, and 0.05 ms for each uncached prompt token, to the first token; 8 ms between tokens; answers of 12 tokens.
The tools' own clients add to the time to first token; how much is not known, so only its slope is compared closely.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from windtunnel.sim.calibrate.formats import read_runs
from windtunnel.sim.calibrate.lone import lones

DATA = Path(__file__).parent.parent.parent / "data" / "calibrate"
ITL_MS, TTFT_MS, PREFILL_TOKEN_MS, TOKENS, REQUESTS = 8.0, 40.0, 0.05, 12, 16


@pytest.mark.parametrize(("name", "clients", "given"), [
    ("aiperf-c1.jsonl", 1, 1), ("aiperf-c4.jsonl", 4, 4), ("guidellm-c1.json", 1, None), ("guidellm-c4.json", 4, None),
])  # fmt: skip
def test_a_real_export_gives_the_servers_own_counts(name: str, clients: int, given: int | None) -> None:
    (run,) = read_runs(DATA / name, concurrency=given)
    assert (run.concurrency, len(run.requests)) == (clients, REQUESTS)
    assert {one.output_tokens for one in run.requests} == {TOKENS}
    assert all([tokens for _at, tokens in one.chunks] == list(range(1, TOKENS + 1)) for one in run.requests)
    assert all(0 <= one.cached_tokens < one.prompt_tokens for one in run.requests)
    assert float(np.median([gap for one in run.requests for gap in one.gaps_ms])) == pytest.approx(ITL_MS, rel=0.1)
    assert all(one.e2e_ms >= one.chunks[-1][0] for one in run.requests)


@pytest.mark.parametrize("clients", [1, 4])
def test_a_real_file_of_vllms_own_benchmark(clients: int) -> None:
    """It says its concurrency and the server's token counts, and nothing of cached tokens."""
    (run,) = read_runs(DATA / f"vllm-bench-c{clients}.json")
    assert (run.concurrency, len(run.requests)) == (clients, REQUESTS)
    assert {one.output_tokens for one in run.requests} == {TOKENS}
    assert len({one.prompt_tokens for one in run.requests}) == REQUESTS and not any(one.cached_tokens for one in run.requests)
    assert all(len(one.chunks) == TOKENS for one in run.requests)
    means = [float(np.mean(one.gaps_ms)) for one in run.requests]
    assert float(np.median(means)) == pytest.approx(ITL_MS, rel=0.1)
    told = json.loads((DATA / f"vllm-bench-c{clients}.json").read_text())
    assert [one.e2e_ms / 1e3 for one in run.requests] == pytest.approx(told["latencies"])


def test_cached_tokens_are_read() -> None:
    shared = [one.cached_tokens for one in read_runs(DATA / "aiperf-c1.jsonl", concurrency=1)[0].requests]
    assert shared == [0, *[64] * (REQUESTS - 1)], "the tool's shared system prompt, 64 tokens in whole blocks"
    assert max(one.cached_tokens for one in read_runs(DATA / "guidellm-c4.json")[0].requests) > 64


@pytest.mark.parametrize(("name", "given"), [("aiperf-c1.jsonl", 1), ("guidellm-c1.json", None)])
def test_a_fit_finds_the_server(name: str, given: int | None) -> None:
    (run,) = read_runs(DATA / name, concurrency=given)
    (alone,) = lones([[run]])
    context = float(np.mean([one.prompt_tokens + TOKENS / 2 for one in run.requests]))
    assert alone.step_ms + alone.context_token_ms * context == pytest.approx(ITL_MS, rel=0.03)
    typical = 300
    slope = alone.prefill_token_ms + alone.prompt_token_ms + alone.prefill_pair_ms * typical
    assert slope == pytest.approx(PREFILL_TOKEN_MS, rel=0.7)
    first_ms = alone.first_ms + alone.step_ms
    assert TTFT_MS * 0.9 < first_ms < TTFT_MS * 1.6
