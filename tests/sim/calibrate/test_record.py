"""What the recorder keeps of a real export: the committed files are what it makes of themselves, and nothing private is."""

import json
from pathlib import Path

import pytest
from tests.sim.calibrate import record

FILES = [
    (tool, record.DATA / tool.file.format(clients=clients)) for tool in record.TOOLS.values() for clients in record.CLIENTS
]


@pytest.mark.parametrize(("tool", "file"), FILES, ids=[file.name for _, file in FILES])
def test_a_committed_file_has_all_that_is_kept(tool: record.Tool, file: Path) -> None:
    text = file.read_text()
    assert tool.kept(text) == text


def test_prompts_answers_and_paths_are_left_out() -> None:
    guidellm = json.loads((record.DATA / "guidellm-c1.json").read_text())
    guidellm["config"] = {"model": "/home/somebody/private"}
    guidellm["benchmarks"][0]["config"]["backend"] = "/home/somebody/private"
    guidellm["benchmarks"][0]["requests"]["successful"][0] |= {"request_args": "private", "output": "private"}
    guidellm["benchmarks"][0]["scheduler_state"] = "private"
    aiperf = json.loads((record.DATA / "aiperf-c1.jsonl").read_text().splitlines()[0])
    aiperf |= {"error": None, "payload": "private"}
    aiperf["metrics"]["nobody_reads_it"] = {"value": "private"}
    vllm = json.loads((record.DATA / "vllm-bench-c4.json").read_text())
    vllm |= {"tokenizer_id": "/home/somebody/private", "generated_texts": ["private"]}
    told = record.kept_of_guidellm(json.dumps(guidellm)) + record.kept_of_aiperf(json.dumps(aiperf))
    assert "private" not in told + record.kept_of_vllm_bench(json.dumps(vllm))


def test_a_busy_machine_records_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record.os, "getloadavg", lambda: (record.LOAD_MOST + 0.1, 0.0, 0.0))
    monkeypatch.setattr(record.peers, "find", lambda name: tmp_path / name)
    assert record.main(["--out", str(tmp_path / "out")]) == 2
    assert "1.6" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
