"""The self-test's arithmetic, its file of runs, and its end on a signal."""

import asyncio
import errno
import json
import shlex
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import until
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.lab import selftest
from windtunnel.lab.finding import Finding, Severity
from windtunnel.lab.process_facts import alive
from windtunnel.lab.selftest import Case, Run, Seen, Turn, schedule
from windtunnel.lab.selftest_document import selftest_document, summary
from windtunnel.lab.selftest_log import LogError, RunLog, head_of

CUT = Case("cut-stream", "unterminated_stream")
HEAD = head_of([CUT], 3, 7)
EVIDENCE = ("later [wt:7] sent at 1.000 s: cut after 3 words", "… and 2 more")
SEEN = (
    Seen(Finding("unterminated_stream", Severity.HIGH, "an exception", EVIDENCE, 3), "crowd", 2.5),
    Seen(Finding("collateral_abort", Severity.LOW, "ids", ("x",), 1, "unterminated_stream"), "pairs", 4.0),
)


def test_the_self_test_counts_what_was_named_right() -> None:
    def seen(name: str, seconds: float) -> Seen:
        return Seen(Finding(name, Severity.HIGH, "", ("x",), 1), "crowd", seconds)

    case = Case("deaf", "zombie_tokens")
    runs = [
        Run(case, 1, (seen("zombie_tokens", 2.0), seen("late_cancel", 2.0)), 3.0),
        Run(case, 2, (seen("late_cancel", 2.0),), 3.0),
        Run(case, 3, (), 3.0),
        Run(None, 4, (), 3.0),
        Run(None, 5, (seen("wedged", 1.0),), 3.0),
        Run(None, 6, (), 3.0, "did not answer"),
    ]
    document = selftest_document(runs, len(runs))
    assert document["by_fault"]["deaf"]["found"] == 2
    assert document["by_fault"]["deaf"]["named_right"] == 1
    assert document["by_fault"]["deaf"]["missed_seeds"] == [2, 3]
    assert document["detection_rate"] == pytest.approx(1 / 3)
    assert document["false_alarm_rate"] == pytest.approx(2 / 3)
    assert not document["goal_met"]
    order = schedule([case, Case("x", "y")], 3, seed=1)
    assert sum(planted for _, planted, _ in order) == 6 == sum(not planted for _, planted, _ in order)
    assert order == schedule([case, Case("x", "y")], 3, seed=1) != schedule([case, Case("x", "y")], 3, seed=2)


def of_one(fault: str, right: int, total: int) -> list[Run]:
    found = Seen(Finding("zombie_tokens", Severity.HIGH, "", ("x",), 1), "crowd", 2.0)
    return [Run(Case(fault, "zombie_tokens"), seed, (found,) if seed < right else (), 3.0) for seed in range(total)]


def test_the_summary_says_which_defects_fall_short_of_the_goal() -> None:
    clean = [Run(None, seed, (), 3.0) for seed in range(200)]
    runs = [*of_one("deaf", 19, 20), *of_one("numb", 18, 20), *clean]
    document = selftest_document(runs, len(runs))
    assert document["goal"] == {"below": ["numb"], "too_few_runs": []} and not document["goal_met"]
    assert list(summary(document)) == [
        "deaf: zombie_tokens in 19 of 20 (95 %: 75.1%…99.9%), after 2.0 s, at most 2.0 s"
        " (found at all: 19; also: nothing; consequences: none)",
        "numb: zombie_tokens in 18 of 20 (95 %: 68.3%…98.8%), after 2.0 s, at most 2.0 s"
        " (found at all: 18; also: nothing; consequences: none)",
        "found: 92.5% of 40 runs (95 %: 79.6%…98.4%)",
        "named right: 92.5% of 40 runs (95 %: 79.6%…98.4%)",
        "false alarms: 0.0% of 200 runs (95 %: 0.0%…1.8%)",
        "goal, every defect named right in 19 of 20 runs: missed: numb (18 of 20)",
        "goal, no false alarm in 200 clean runs: met",
    ]


def test_a_goal_that_few_runs_cannot_show_is_not_called_met() -> None:
    found = Seen(Finding("wedged", Severity.HIGH, "", ("x",), 1), "crowd", 2.0)
    few = selftest_document([*of_one("deaf", 3, 3), Run(None, 1, (), 3.0)], 4)
    assert few["goal_met"] and few["goal"]["too_few_runs"] == ["deaf"]
    assert list(summary(few))[-2:] == [
        "goal, every defect named right in 19 of 20 runs: holds so far, not shown: 1 of 1 defects have fewer than 20 runs",
        "goal, no false alarm in 200 clean runs: holds so far, not shown: there were 1",
    ]
    loud = selftest_document([Run(None, 1, (), 3.0), Run(None, 2, (found,), 3.0)], 4)
    assert list(summary(loud))[-2:] == [
        "goal, every defect named right in 19 of 20 runs: not tried",
        "goal, no false alarm in 200 clean runs: missed: 1 of 2",
    ]
    assert "incomplete: 2 of 4 servers were tried" in list(summary(loud))


def test_less_than_planned_is_incomplete() -> None:
    case = Case("deaf", "zombie_tokens")
    found = Seen(Finding("zombie_tokens", Severity.HIGH, "", ("x",), 1), "crowd", 2.0)
    runs = [Run(case, 1, (found,), 3.0), Run(None, 1, (), 3.0)]
    whole, part = selftest_document(runs, 2), selftest_document(runs[:1], 2)
    assert whole["complete"] and whole["goal_met"]
    assert not part["complete"] and not part["goal_met"] and part["planned"] == 2 and part["detection_rate"] == 1.0
    mixed = selftest_document(runs, 2, one_state=False)
    assert not mixed["complete"] and not mixed["goal_met"] and not mixed["one_state"]


def begin(path: Path, *runs: tuple[Turn, Run]) -> None:
    with closing(RunLog.begin(path, HEAD)) as log:
        for turn, run in runs:
            log.add(turn, run)


def runs_in(path: Path) -> Mapping[Turn, Run]:
    with closing(RunLog.go_on(path, HEAD, [CUT])) as log:
        return log.done


def test_runs_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = {
        Turn(CUT, True, 7): Run(CUT, 7, SEEN, 12.25),
        Turn(CUT, False, 8): Run(None, 8, (), 11.0),
        Turn(CUT, False, 9): Run(None, 9, SEEN[:1], 11.0, "did not answer"),
    }
    begin(path, *runs.items())
    assert runs_in(path) == runs
    assert set(runs) < set(schedule([CUT], 3, 7))


def test_a_line_that_was_being_written_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    begin(path, (Turn(CUT, True, 7), Run(CUT, 7, SEEN, 12.0)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"defect": "cut-str')
    with closing(RunLog.go_on(path, HEAD, [CUT])) as log:
        assert path.read_bytes() == whole
        log.add(Turn(CUT, False, 7), Run(None, 7, (), 12.0))
    assert len(runs_in(path)) == 2


def test_two_self_tests_cannot_have_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with closing(RunLog.begin(path, HEAD)) as log:
        with pytest.raises(LogError, match=f"another self-test is at work in {tmp_path}: wait"):
            RunLog.go_on(path, HEAD, [CUT])
        log.add(Turn(CUT, True, 7), Run(CUT, 7, SEEN, 12.0))
    with closing(RunLog.go_on(path, HEAD, [CUT])), pytest.raises(LogError, match="at work"):
        RunLog.go_on(path, HEAD, [CUT])
    assert len(runs_in(path)) == 1


def test_the_command_refuses_a_folder_that_another_is_at_work_in(tmp_path: Path) -> None:
    words = ["selftest", "--only", "cut-stream", "--runs", "3", "--seed", "7", "--out", str(tmp_path), "--resume"]
    with closing(RunLog.begin(tmp_path / "runs.jsonl", HEAD)):
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"another self-test is at work in {tmp_path}" in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "0"}, "another code"),
        ({"seed": 8}, r"another seed \(7, here 8\)"),
        ({"runs": 4}, "another runs"),
        ({"defects": ["late-abort"]}, "another defects"),
    ],
)
def test_runs_of_another_self_test_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "runs.jsonl"
    begin(path)
    with pytest.raises(LogError, match=message):
        RunLog.go_on(path, HEAD | changes, [CUT])


def test_what_is_no_file_of_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with pytest.raises(LogError, match="No such file"):
        RunLog.go_on(path, HEAD, [CUT])
    begin(path)
    with pytest.raises(LogError, match="already: go on with --resume"):
        RunLog.begin(path, HEAD)
    path.write_text(json.dumps(HEAD) + '\n{"defect": "unheard-of"}\n')
    with pytest.raises(LogError, match="unheard-of"):
        RunLog.go_on(path, HEAD, [CUT])
    path.write_text("[]\n")
    with pytest.raises(LogError, match="first line"):
        RunLog.go_on(path, HEAD, [CUT])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\x00", "is damaged"),
        (b'{"defect": "cut-stream", "planted": true, "seed": 8, "seconds": 1, "unusable": null, "seen": ["x"]}', "not one of"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(json.dumps(HEAD).encode() + b"\n" + line + b"\n")
    with pytest.raises(LogError, match=message):
        RunLog.go_on(path, HEAD, [CUT])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
async def test_a_stopped_self_test_says_what_it_has(number: int, ignored: bool, tmp_path: Path) -> None:
    """A shell lets what it runs in the background ignore SIGINT."""
    begin(tmp_path / "runs.jsonl", (Turn(CUT, False, 8), Run(None, 8, (), 11.0)))
    words = [sys.executable, "-m", "windtunnel", "selftest", "--only", "cut-stream", "--runs", "3", "--seed", "7"]
    words += ["--out", str(tmp_path), "--resume", "--json"]
    trap = "trap '' INT;" if ignored else ""
    words = ["sh", "-c", f"{trap} exec {shlex.join(words)}"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    await until(lambda: bool(children(process.pid)))
    servers = children(process.pid)
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 3, err.decode()
    document = json.loads(out)
    assert (document["complete"], document["planned"], document["clean_runs"], document["faulty_runs"]) == (False, 6, 1, 0)
    assert json.loads((tmp_path / "selftest.json").read_text()) == document
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2
    assert not any(alive(pid) for pid in servers)
    assert "Traceback" not in err.decode()


async def test_a_server_that_is_being_judged_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, told = asyncio.Event(), []

    async def for_ever(url: str, seed: int, **_: Any) -> None:
        stop.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(selftest, "examine", for_ever)
    async with asyncio.timeout(60):
        await selftest.run_selftest(schedule([CUT], 2, 7), stop=stop, tell=lambda turn, run: told.append(run))
    assert told == []


@pytest.mark.parametrize("words", [[], ["--resume"]], ids=["begun", "resumed"])
def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    if words:
        begin(tmp_path / "runs.jsonl")

    def flock(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    command = ["selftest", "--only", "cut-stream", "--runs", "3", "--seed", "7", "--out", str(tmp_path), *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"{tmp_path} cannot be locked (No locks available): name a folder on another file system" in result.stderr
    assert (tmp_path / "runs.jsonl").exists() == bool(words), "what holds no runs stands in nobody's way"
