"""Traces of load tools: what each format gives, and errors that name file, line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.sim.calibrate.formats import TraceError, read_runs

OURS = {
    "pass": 1, "concurrency": 2, "start_s": 1.5, "prompt_tokens": 64, "cached_tokens": 32, "output_tokens": 3,
    "headers_ms": 2.0, "ttft_ms": 5.0, "e2e_ms": 9.5, "chunks": [[5.0, 1], [9.0, 3]],
}  # fmt: skip
VLLM = {
    "max_concurrency": 8, "input_lens": [10, 20, 30], "output_lens": [3, 0, 3], "ttfts": [0.01, 0.0, 0.02],
    "itls": [[0.002, 0.003], [], [0.004]], "start_times": [1.0, 1.1, 1.2], "errors": ["", "refused", ""],
}  # fmt: skip
AIPERF = {
    "metadata": {"request_start_ns": 1_500_000_000, "benchmark_phase": "profiling"},
    "metrics": {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 4, "unit": "tokens"},
        "time_to_first_token": {"value": 10.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [1.0, 2.0, 3.0], "unit": "ms"},
        "request_latency": {"value": 17.0, "unit": "ms"},
    },
    "error": None,
}
GUIDELLM = {
    "benchmarks": [
        {
            "config": {"strategy": {"type_": strategy, "streams": streams}},
            "requests": {
                "successful": [
                    {
                        "request_start_time": 100.0, "request_latency": 0.05, "prompt_tokens": 7, "output_tokens": 4,
                        "time_to_first_token_ms": 20.0, "inter_token_latency_ms": 10.0,
                    }
                ]
            },
        }
        for strategy, streams in (("synchronous", None), ("concurrent", 4), ("poisson", None))
    ]
}  # fmt: skip


def write(folder: Path, *documents: Any) -> Path:
    path = folder / "trace.json"
    path.write_text("\n".join(json.dumps(document) for document in documents), "utf-8")
    return path


def test_our_own_format_keeps_every_chunk_and_groups_by_load(tmp_path: Path) -> None:
    open_loop = {**OURS, "concurrency": None, "poisson_rate_rps": 5}
    runs = read_runs(write(tmp_path, OURS, {**OURS, "concurrency": 8}, OURS, open_loop))
    assert [(run.name, run.concurrency, len(run.requests)) for run in runs] == [
        ("pass 1 c=2", 2, 2), ("pass 1 c=8", 8, 1), ("pass 1 5 rps", None, 1),
    ]  # fmt: skip
    one = runs[0].requests[0]
    assert (one.ttft_ms, one.gaps_ms, one.token_gaps_ms, one.cached_tokens, one.headers_ms) == (5.0, [4.0], [2.0, 2.0], 32, 2.0)


def test_vllm_bench_leaves_failed_requests_out_and_spreads_tokens_over_chunks(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path, VLLM))
    assert run.concurrency == 8 and len(run.requests) == 2
    assert [round(at, 6) for at, _tokens in run.requests[0].chunks] == [10.0, 12.0, 15.0]
    assert [tokens for _at, tokens in run.requests[1].chunks] == [1, 3]


def test_aiperf_needs_the_concurrency_and_skips_what_failed(tmp_path: Path) -> None:
    path = write(tmp_path, AIPERF, {**AIPERF, "error": {"code": 499}, "metrics": None})
    with pytest.raises(TraceError, match="does not say its concurrency: give --concurrency"):
        read_runs(path)
    (run,) = read_runs(path, concurrency=4)
    (one,) = run.requests
    assert (one.prompt_tokens, one.chunks, one.e2e_ms) == (550, ((10.0, 1), (11.0, 2), (13.0, 3), (16.0, 4)), 17.0)


def test_guidellm_gives_one_run_for_each_benchmark(tmp_path: Path) -> None:
    runs = read_runs(write(tmp_path, GUIDELLM))
    assert [run.concurrency for run in runs] == [1, 4, None]
    assert runs[0].requests[0].chunks == ((20.0, 1), (30.0, 2), (40.0, 3), (50.0, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e2e_ms": "9"}, "trace.json line 2: e2e_ms is '9': must be a number of 0 to"),
        ({"prompt_tokens": 1.5}, "trace.json line 2: prompt_tokens is 1.5: must be a whole number"),
        ({"prompt_tokens": 1e12}, r"trace.json line 2: prompt_tokens is 1000000000000.0: must be a number of 1 to 10000000"),
        ({"output_tokens": 10**400}, "trace.json line 2: output_tokens is 1000+: must be a number of 1 to"),
        ({"concurrency": 1e9}, "trace.json line 2: concurrency is 1000000000.0: must be a number of 1 to 1000000"),
        ({"e2e_ms": 1e300}, r"trace.json line 2: e2e_ms is 1e\+300: must be a number of 0 to 1e\+12"),
        ({"start_s": 1e300}, r"trace.json line 2: start_s is 1e\+300: must be a number of 0 to 1e\+12"),
        (
            {"chunks": [[1, 1], [2, 1e12]]},
            r"trace.json line 2: chunks\[1\]\[1\] is 1000000000000.0: must be a number of 1 to 1000000",
        ),
        ({"start_s": None}, "trace.json line 2: start_s is missing"),
        ({"chunks": []}, "trace.json line 2: chunks is empty"),
        ({"chunks": [[1, 1], [2]]}, r"trace.json line 2: chunks\[1\] is \[2\]: must be \[milliseconds, tokens so far\]"),
        ({"chunks": [[2, 1], [1, 2]]}, r"trace.json line 2: chunks\[1\] is \[1.0, 2\]: times must not fall"),
        ({"cached_tokens": 64}, "trace.json line 2: cached_tokens is 64: must be below prompt_tokens 64"),
        ({"pass": "../x"}, r"trace.json line 2: pass is '../x': must be a number or a name of at most 64 letters"),
        ({"pass": "x" * 65}, "trace.json line 2: pass is 'x+': must be a number or a name"),
        ({"pass": [1]}, r"trace.json line 2: pass is \[1\]: must be a number or a name"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_runs(write(tmp_path, OURS, {**OURS, **change}))


def test_other_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    for document, message in (
        ({"a": 1}, "no known format has these fields; the first ones are a"),
        ({"experiments": []}, "GenAI-Perf profile has no token counts"),
        ({**VLLM, "itls": []}, "lists differ in length: .*'itls': 0"),
        ({**VLLM, "ttfts": [0.01, 0.0, None]}, "request 2: ttfts is None: must be a number"),
        ([1], "must be a JSON object, not list"),
    ):
        with pytest.raises(TraceError, match=message):
            read_runs(write(tmp_path, document))
    (tmp_path / "trace.json").write_text(json.dumps(OURS) + "\n{nonsense", "utf-8")
    with pytest.raises(TraceError, match=r"trace.json line 2: not JSON: .* at column 2"):
        read_runs(tmp_path / "trace.json")
    (tmp_path / "trace.json").write_text("", "utf-8")
    with pytest.raises(TraceError, match="is empty"):
        read_runs(tmp_path / "trace.json")


def test_counts_of_the_tools_are_bounded(tmp_path: Path) -> None:
    """A count becomes a list of so many tokens."""
    (benchmark, *_) = GUIDELLM["benchmarks"]
    (request,) = benchmark["requests"]["successful"]
    huge = {"benchmarks": [{**benchmark, "requests": {"successful": [{**request, "output_tokens": 10**12}]}}]}
    metrics = {**AIPERF["metrics"], "output_sequence_length": {"value": 1e12, "unit": "tokens"}}  # type: ignore[dict-item]
    for document, message in (
        (huge, r"successful\[0\]: output_tokens is 1000000000000: must be a number of 1 to 1000000"),
        ({**AIPERF, "metrics": metrics}, r"output_sequence_length: value is 1000000000000.0: must be a number of 1 to 1000000"),
        (
            {**VLLM, "input_lens": [10, 20, 1e12]},
            r"request 2: input_lens is 1000000000000.0: must be a number of 1 to 10000000",
        ),
        ({**VLLM, "max_concurrency": "x"}, "max_concurrency is 'x': must be a number of 1 to 1000000"),
        ({**VLLM, "start_times": [1.0]}, "lists differ in length: .*'start_times': 1"),
    ):
        with pytest.raises(TraceError, match=message):
            read_runs(write(tmp_path, document), concurrency=4 if "metrics" in document else None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\xff\xfe', "trace.json: is not UTF-8: invalid start byte at byte 9"),
        (b"[" * 100_000, "trace.json line 1: is nested too deeply"),
        (b'{"chunks": ' + b"1" * 5000 + b"}", "trace.json line 1: not JSON: "),
    ],
)
def test_what_no_parser_takes_is_a_wrong_trace(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_runs(tmp_path / "trace.json")
