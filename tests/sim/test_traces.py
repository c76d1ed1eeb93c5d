"""Trace files: each format as its publisher writes it, and what is said about a line that is wrong."""

import os
from pathlib import Path

import pytest

from windtunnel.core.units import MS, S
from windtunnel.sim.cluster import Cluster, run
from windtunnel.sim.scenario import ScenarioError, parse_scenario
from windtunnel.sim.traces import TraceRow, detect, read_trace

GOLDEN = Path(os.environ.get("WINDTUNNEL_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "vllm" / "trace.jsonl"

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 3]}
"""
DYNAMO = """\
{"session_id": "a", "created_time": 10, "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 1]}
{"session_id": "a", "delay_ms": 250, "input_tokens": 900, "output_tokens": 5, "hash_ids": [0, 1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319569,3180,8
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
6.5,ChatGPT,30,0,30,Conversation log
45,GPT-4,1087,230,1317,API log
"""
VLLM_BENCH = '{"prompt": "What is the capital of India, please?", "output_tokens": 10}\n'
GUIDELLM = '{"prompt": "Hi", "prompt_tokens_count": 128, "output_tokens_count": 64}\n'
AIPERF = '{"text": "12345678", "timestamp": 1500, "session_id": "s"}\n'


@pytest.mark.parametrize(
    ("text", "name", "rows"),
    [
        (MOONCAKE, "mooncake", [TraceRow(0, 1100, 5, (0, 1, 2)), TraceRow(27482 * MS, 1030, 7, (0, 1, 3))]),
        (DYNAMO, "mooncake", [TraceRow(10 * MS, 600, 5, (0, 1), "a"), TraceRow(None, 900, 5, (0, 1), "a", 250 * MS)]),
        (AZURE, "azure", [TraceRow(0, 4808, 10), TraceRow(51_996_900, 3180, 8)]),
        (AZURE_2024, "azure", [TraceRow(0, 2162, 5), TraceRow(990_070_000, 2399, 6)]),
        (BURSTGPT, "burstgpt", [TraceRow(5 * S, 472, 18), TraceRow(45 * S, 1087, 230)]),
        (VLLM_BENCH, "loadtool", [TraceRow(None, 9, 10)]),
        (GUIDELLM, "loadtool", [TraceRow(None, 128, 64)]),
        (AIPERF, "loadtool", [TraceRow(1500 * MS, 2, 0, (), "s")]),
    ],
)
def test_formats(tmp_path: Path, text: str, name: str, rows: list[TraceRow]) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert detect(path) == name
    assert read_trace(path) == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"timestamp": 0, "output_length": 5, "hash_ids": []}\n', "line 1: input_length or input_tokens is missing"),
        ('{"timestamp": 0, "input_length": "many", "output_length": 5, "hash_ids": []}\n', "line 1: input_length is 'many'"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 9, "output_length": 5}\n', "line 3: timestamp is -1"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 9, "output_length": 5, "hash_ids": 3}\n', "line 3: hash_ids is '3'"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 9, "output_length": 5, "hash_ids": [1, 2]}\n',
            "line 3: hash_ids has 2 blocks",
        ),
        (MOONCAKE + "{oh\n", "line 3: not JSON"),
        (MOONCAKE + "[]\n", "line 3: must be a JSON object"),
        (MOONCAKE + '{"input_length": 9, "output_length": 5}\n', "line 3: timestamp is missing"),
        (AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:17:03.9799600,1.5,2\n", "line 4: ContextTokens is 1.5"),
        ("Timestamp,Request tokens\n5,472\n", "line 1: no column Response tokens"),
        ("when,what\n1,2\n", "line 1: no known trace format"),
        ('{"output_tokens": 5}\n', "line 1: no prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ScenarioError, match="trace: ") as caught:
        read_trace(path)
    assert said in str(caught.value)


def test_a_missing_file_is_a_scenario_error() -> None:
    with pytest.raises(ScenarioError, match="No such file"):
        read_trace(Path("nowhere.jsonl"), "mooncake")


def test_equal_block_ids_hit_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    result = run(parse_scenario({"duration": "1m", "workload": {"kind": "trace", "trace": str(path)}}))
    assert result.summary["requests"]["finished"] == 2
    assert result.summary["prefix_cache"] == {"prompt_tokens": 2130, "cached_tokens": 1024}


def test_a_later_turn_waits_for_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(DYNAMO)
    cluster = Cluster(parse_scenario({"workload": {"kind": "trace", "trace": str(path), "trace_speed": 2}}))
    started: list[tuple[int, int]] = []
    ended: list[int] = []
    cluster.clients._on_ended = lambda call, forward=cluster._ended: (  # type: ignore[misc]
        started.append((call.question.turn, call.started_ns)),
        ended.append(call.ended_ns),
        forward(call),
    )
    cluster.run()
    assert started == [(0, 5 * MS), (1, ended[0] + 125 * MS)]


@pytest.mark.skipif(not GOLDEN.exists(), reason=f"no recordings at {GOLDEN}")
def test_golden_trace() -> None:
    rows = read_trace(GOLDEN)
    assert len(rows) == sum(1 for line in GOLDEN.read_text().splitlines() if line)
    times = [row.at_ns for row in rows if row.at_ns is not None]
    assert len(times) == len(rows) and times[0] == 145_814_000
    assert {row.shared_prefix_tokens for row in rows} == {0, 256}
    scenario = {"duration": "10s", "workload": {"kind": "trace", "trace": str(GOLDEN)}, "metrics": False}
    counts = run(parse_scenario(scenario)).summary["requests"]
    assert counts["finished"] == counts["sent"] == sum(at_ns < 10 * S for at_ns in times)
