"""Whole runs with the fake server as both arms: documents, files, and no process left behind."""

import asyncio
import contextlib
import copy
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import typer
from tests.lab.conftest import server_command, until
from tests.lab.fake_server import EXIT_STATUS
from typer.testing import CliRunner

from windtunnel.cli import experiment as experiment_command
from windtunnel.cli import report as report_command
from windtunnel.cli import storm as storm_command
from windtunnel.lab import arms
from windtunnel.lab.arms import Running, count_patterns, fill, running
from windtunnel.lab.connection import ConnectionCut
from windtunnel.lab.experiment import Options, Progress, run_experiment, schedule, with_options
from windtunnel.lab.experiment_file import Arm, Environment, Experiment, parse
from windtunnel.lab.process_facts import alive as runs
from windtunnel.lab.progress import print_experiment
from windtunnel.lab.report import DocumentError, check_document, html, schema, write_all
from windtunnel.ports import free_port

app = typer.Typer()
for command in (experiment_command, report_command, storm_command):
    command.register(app)

MAIN = """
import typer
from windtunnel.cli import experiment
app = typer.Typer()
experiment.register(app)
app(["experiment", *{!r}])
"""


def alive(folder: Path) -> list[int]:
    """Servers that left their id in this folder and still run."""
    return [int(one.name) for one in folder.iterdir() if runs(int(one.name))]


def started(folder: Path) -> bool:
    return any(folder.iterdir())


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A folder for process ids; whatever a failed test has left running is ended."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for pid in alive(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real run, shared by the tests that only read it."""
    from tests.lab.conftest import EXPERIMENT

    from windtunnel.lab.experiment_file import parse

    folder = tmp_path_factory.mktemp("run")
    experiment = parse(EXPERIMENT.format(server=server_command()), "fake.toml")
    return asyncio.run(run_experiment(experiment, Options(out=folder)))


def test_the_document_has_the_promised_shape(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(document)))
    assert document["verdict"] == "confirmed"
    assert [one["holds"] for one in document["predictions"]] == [True, True]
    assert [one["observed"] for one in document["predictions"]][1] == [0, 0]
    control, treatment = (document["arms"][arm]["trials"] for arm in ("control", "treatment"))
    assert [trial["race_reports"] for trial in (*control, *treatment)] == [2, 2, 0, 0]
    assert all(
        trial["bystanders"]["sent"] == 12 and trial["later_streams"]["complete"] == 4 for trial in (*control, *treatment)
    )
    assert {finding["name"] for finding in document["findings"]} == {"bystander_error"}
    assert {finding["arm"] for finding in document["findings"]} == {"control"}
    assert document["effect"]["p_value"] < 0.05


@pytest.mark.parametrize("missing", ["verdict", "arms", "reproduce"])
def test_the_schema_notices_what_is_missing(document: dict[str, Any], missing: str) -> None:
    broken = {key: value for key, value in document.items() if key != missing}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(broken)
    with pytest.raises(DocumentError, match=missing):
        check_document(broken)


def test_the_report_needs_nothing_from_outside(document: dict[str, Any], tmp_path: Path) -> None:
    page = html(document)
    for outside in ("http://", "https://", "<script", "@import", "url("):
        assert outside not in page.replace("http://127.0.0.1", "")
    assert page.count("<figure") == 4
    assert "Confirmed" in page
    written = write_all(document, tmp_path)
    assert [path.name for path in written] == ["result.json", "report.html", "junit.xml"]
    assert json.loads((tmp_path / "result.json").read_text("utf-8")) == json.loads(json.dumps(document))


def test_the_report_escapes_what_a_server_said(document: dict[str, Any]) -> None:
    evil = {**document, "title": "<script>alert(1)</script>"}
    assert "<script" not in html(evil)


def test_junit_counts_predictions_and_findings(document: dict[str, Any], tmp_path: Path) -> None:
    worse = {
        **document,
        "predictions": [{**document["predictions"][0], "holds": False}, {**document["predictions"][1], "holds": None}],
        "findings": [*document["findings"], {**document["findings"][0], "arm": "treatment"}],
    }
    write_all(worse, tmp_path)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(2 + len(worse["findings"])), "2", "1")


def test_the_order_of_arms_is_drawn_from_the_seed() -> None:
    orders = {tuple(schedule(4, seed)) for seed in range(20)}
    assert len(orders) > 1
    assert schedule(4, 1) == schedule(4, 1)
    for order in orders:
        assert sorted(order) == sorted((trial, arm) for trial in range(4) for arm in ("control", "treatment"))


def test_options_replace_what_the_file_says(experiment: Experiment) -> None:
    changed = with_options(
        experiment, Options(trials=7, seed=9, commands={"control": "x {port}"}, ready_url="http://127.0.0.1:{port}/r")
    )
    assert (changed.trials, changed.seed) == (7, 9)
    assert changed.arms.control.command == "x {port}"
    assert changed.arms.treatment.command == experiment.arms.treatment.command
    assert changed.arms.treatment.ready_url == "http://127.0.0.1:{port}/r"


def test_templates() -> None:
    assert fill("{port} {seed} --itl {20ms}", port=7, time_scale=2, seed=3) == "7 3 --itl 10ms"
    assert fill("{python}", port=7, time_scale=1, seed=3) == sys.executable
    with pytest.raises(ValueError, match=r"unknown placeholder \{prot\}"):
        fill("{prot}", port=7, time_scale=1, seed=3)


def test_log_patterns_are_counted_by_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"WARNING: DATA RACE\nok \xff\nWARNING: DATA RACE WARNING: DATA RACE\n")
    assert count_patterns(log, {"races": "DATA RACE", "panics": "^panic"}) == {"races": 2, "panics": 0}
    assert count_patterns(None, {"races": "x"}) == {"races": 0}


async def test_a_server_that_exits_is_an_environment_error(tmp_path: Path) -> None:
    arm = Arm(command=f"{sys.executable} -c 'raise SystemExit(\"no such model\")'")
    with pytest.raises(Environment, match=r"exited with 1 before it was ready(?s:.*)no such model"):
        async with running(arm, tmp_path / "log", time_scale=1, seed=0):
            pass


@pytest.mark.parametrize(("more", "cut"), [(-1, False), (1_000, True)])
async def test_logs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, cut: bool) -> None:
    monkeypatch.setattr(arms, "LOG_LIMIT_BYTES", 50_000)
    log = tmp_path / "log"
    chatty = f"import sys; sys.stdout.write('x' * {50_000 + more})"
    with pytest.raises(Environment, match="before it was ready"):
        async with running(Arm(command=shlex.join([sys.executable, "-c", chatty])), log, time_scale=1, seed=0):
            pass
    assert log.read_bytes()[:50_000] == b"x" * min(50_000, 50_000 + more)
    assert log.stat().st_size < 50_100
    assert arms.is_cut(log) is cut
    assert (arms.LOG_LIMIT_NOTE in log.read_text("utf-8")) is cut


async def test_a_command_that_does_not_exist_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(Environment, match="cannot start /no/such/program"):
        async with running(Arm(command="/no/such/program"), tmp_path / "log", time_scale=1, seed=0):
            pass


@pytest.mark.parametrize(("error", "told"), [(ConnectionCut("nobody home"), "nobody home"), (TimeoutError(), "TimeoutError")])
async def test_a_server_that_is_never_ready_is_stopped(
    error: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = arms._start

    async def seen(*told: Any) -> asyncio.subprocess.Process:
        started.append(await start(*told))
        return started[-1]

    async def cut(*_told: Any) -> None:
        raise error

    monkeypatch.setattr(arms, "_start", seen)
    monkeypatch.setattr(arms, "fetch", cut)
    never = f"http://127.0.0.1:{free_port()}/"
    arm = Arm.model_validate({"command": server_command(), "ready_url": never, "ready_timeout": "200ms"})
    with pytest.raises(Environment, match=rf"did not answer 200 within 200ms \({told}\)"):
        async with running(arm, tmp_path / "log", time_scale=1, seed=0):
            pass
    (process,) = started
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


async def test_a_process_that_made_a_session_of_its_own_ends_with_its_arm(tmp_path: Path, pids: Path) -> None:
    words = shlex.split(server_command("--pids", str(pids)))
    launcher = f"import subprocess; subprocess.Popen({words!r}, start_new_session=True).wait()"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(launcher)}"
    async with running(Arm(command=command), tmp_path / "log", time_scale=1, seed=0):
        assert len(alive(pids)) == 1
    await until(lambda: alive(pids) == [])


async def test_cancelling_stops_the_server(tmp_path: Path, pids: Path) -> None:
    up = asyncio.Event()

    async def hold() -> None:
        async with running(Arm(command=server_command("--pids", str(pids))), tmp_path / "log", time_scale=1, seed=0):
            up.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await up.wait()
    assert len(alive(pids)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(pids) == []


async def test_stop_before_a_server_is_ready_ends_it(experiment: Experiment, pids: Path) -> None:
    stop = asyncio.Event()
    command = server_command("--pids", str(pids))
    never = f"http://127.0.0.1:{free_port()}/"
    options = Options(commands={"control": command, "treatment": command}, ready_url=never)
    run = asyncio.create_task(run_experiment(experiment, options, stop=stop))
    await until(lambda: started(pids))
    stop.set()
    document = await run
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(document)))
    assert document["verdict"] == "inconclusive"
    assert alive(pids) == []


async def test_stop_keeps_what_there_is(experiment: Experiment, pids: Path) -> None:
    stop = asyncio.Event()

    def watch(progress: Progress) -> None:
        if progress.done == 1 and progress.event is not None:
            stop.set()

    command = server_command("--pids", str(pids))
    options = Options(commands={"control": command, "treatment": command})
    document = await run_experiment(experiment, options, stop=stop, watch=watch)
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(document)))
    assert document["verdict"] == "inconclusive"
    assert document["interrupted"]
    assert sum(len(document["arms"][arm]["trials"]) for arm in ("control", "treatment")) == 2
    assert alive(pids) == []


@pytest.mark.parametrize("tokens", [4, 25])
async def test_a_server_that_ends_by_itself_is_no_harm(experiment: Experiment, tokens: int) -> None:
    """In its first plain answer, or while its clients leave."""
    options = Options(commands={"control": server_command("--exit-after-tokens", str(tokens))})
    document = await run_experiment(experiment, options)
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(document)))
    message = f"the server ended by itself with exit status {EXIT_STATUS}"
    trials = document["arms"]["control"]["trials"]
    assert [trial["error"] for trial in trials] == [message] * 2
    assert {value for trial in trials for value in trial["leaked"].values()} == {None}
    assert [(one["arm"], one["name"], one["severity"], one["evidence"]) for one in document["findings"]] == [
        ("control", "server_died", "high", [message])
    ] * 2
    assert [one["holds"] for one in document["predictions"]] == [None, True]
    assert document["verdict"] == "inconclusive"
    assert message in document["why"]
    assert message in html(document)


async def test_a_process_on_its_way_to_its_parent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is closed before its status is known."""
    tries: list[bool] = []
    accepts = arms._accepts

    async def seen(url: str) -> bool:
        tries.append(await accepts(url))
        return tries[-1]

    monkeypatch.setattr(arms, "_accepts", seen)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    listening = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    server = Running(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None, process.pid, process=process)
    assert await server.exit_status() is None
    listening.close()
    status = asyncio.ensure_future(server.exit_status())
    await until(lambda: tries[1:3] == [False, False])
    process.stdin.write(b"seven..")
    process.stdin.close()
    assert (tries[0], await status) == (True, 7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_write_the_document_and_leave_no_process(text: str, tmp_path: Path, pids: Path, number: int) -> None:
    (tmp_path / "fake.toml").write_text(text.replace("victims = 3", 'victims = 3\nwhen = "after:5m"'), "utf-8")
    slow = server_command("--pids", str(pids), "--itl-ms", "100")
    arguments = ["run", str(tmp_path / "fake.toml"), "--json", "--control-cmd", slow, "--treatment-cmd", slow]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MAIN.format(arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ,
    )
    await until(lambda: started(pids))
    process.send_signal(number)
    out, _ = await process.communicate()
    document = json.loads(out)
    assert process.returncode == 3
    assert document["verdict"] == "inconclusive"
    assert document["interrupted"]
    assert alive(pids) == []


def test_run_through_the_command_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "fake.toml").write_text(text, "utf-8")
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["experiment", "run", str(tmp_path / "fake.toml"), "--json", "--out", str(out), "--trials", "2"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "confirmed"
    assert {path.name for path in out.iterdir()} >= {
        "result.json",
        "report.html",
        "junit.xml",
        "control-1.log",
        "treatment-2.log",
    }
    (out / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert (out / "report.html").exists()


def test_the_reproduce_command_reproduces(text: str, tmp_path: Path) -> None:
    """It names the file, not only the experiment in it, and carries every option that matters. Trials are told as they end."""
    (tmp_path / "fake.toml").write_text(text, "utf-8")
    options = ["--trials", "2", "--seed", "5", "--time-scale", "2", "--aa", "treatment", "--looks", "2"]
    runs = [["experiment", "run", str(tmp_path / "fake.toml"), *options]]
    documents = []
    for _ in range(2):
        result = CliRunner().invoke(app, [*runs[-1], "--json"])
        documents.append(json.loads(result.stdout))
        assert "control, trial 1 (1 of 4)" in result.stderr or "treatment, trial 1 (1 of 4)" in result.stderr
        assert "(4 of 4): 0 of 12 bystanders harmed, 4 of 4 later streams complete" in result.stderr
        program, *words = shlex.split(documents[-1]["reproduce"])
        assert program == "windtunnel"
        runs.append(words)
    first, second = documents
    same = ("verdict", "seed", "trials", "time_scale", "reproduce", "storm", "experiment")
    assert {key: first[key] for key in same} == {key: second[key] for key in same}
    assert [one["observed"] for one in first["predictions"]] == [one["observed"] for one in second["predictions"]]
    assert first["effect"]["aa"] is True
    assert [trial["order"] for trial in first["arms"]["control"]["trials"]] == [
        trial["order"] for trial in second["arms"]["control"]["trials"]
    ]


def test_a_late_environment_error_keeps_the_trials_before_it(text: str, tmp_path: Path) -> None:
    seed = next(seed for seed in range(20) if schedule(2, seed)[0][1] == "control")
    (tmp_path / "fake.toml").write_text(text, "utf-8")
    out = tmp_path / "out"
    bad = shlex.join([sys.executable, "-c", "raise SystemExit('API_KEY=hunter22')"])
    arguments = ["experiment", "run", str(tmp_path / "fake.toml"), "--out", str(out), "--seed", str(seed)]
    result = CliRunner().invoke(app, [*arguments, "--treatment-cmd", bad])
    assert result.exit_code == 2
    assert "treatment, trial 1: the server exited with 1 before it was ready" in result.stderr
    assert "hunter22" not in result.output
    document = json.loads((out / "result.json").read_text("utf-8"))
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert document["verdict"] == "inconclusive"
    assert [len(document["arms"][arm]["trials"]) for arm in ("control", "treatment")] == [1, 1]
    assert document["arms"]["control"]["trials"][0]["bystanders"]["sent"] == 12
    assert {path.name for path in out.iterdir()} >= {"report.html", "junit.xml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment", "run", "nothing"], "cancelled-streams"),
        (
            ["experiment", "run", "cancelled-streams", "--control-cmd", "/no/such", "--treatment-cmd", "/no/such"],
            "cannot start",
        ),
        (["experiment", "run", "cancelled-streams", "--control-cmd", "x {prot}"], "--control-cmd: unknown placeholder"),
        (["experiment", "show", "nothing"], "no built-in"),
        (["report", "/no/such/folder"], "No such file"),
        (["storm", "http://10.0.0.1:1", "--model", "m"], "--i-own-this-target"),
        (["storm", "http://10.0.0.1:1"], "--i-own-this-target"),
        (["storm", "http://127.0.0.1:1", "--metrics-url", "http://10.0.0.1:1/metrics"], "10.0.0.1 is not this machine"),
        (["storm", "http://127.0.0.1:1", "--model", "m", "--when", "soon"], "none of incomplete"),
        (["storm", "http://127.0.0.1:1", "--model", "m", "--victims", "9999"], "--max-requests"),
        (["storm", "http://127.0.0.1:1"], "/v1/models"),
        (["storm", "http://127.0.0.1:1", "--model", "m"], "/metrics"),
    ],
)
def test_usage_and_environment_errors_exit_with_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_no_secret_of_a_command_or_a_variable_is_in_the_document(text: str, tmp_path: Path) -> None:
    secrets = "env DB_PASS=geheim1 AWS_SECRET_ACCESS_KEY=geheim2 X=http://h/?api_key=geheim3 Y='X-Api-Key: geheim4' "
    command = f"command = '{server_command()}'"
    env = "env = { AZURE_OPENAI_API_KEY = 'geheim5', MAX_TOKENS = '400' }"
    changed = text.replace(command, f'command = """{secrets}{server_command()}"""\n{env}')
    experiment = parse(changed, "x")
    document = asyncio.run(run_experiment(experiment, Options(trials=1, aa="treatment", out=tmp_path)))
    write_all(document, tmp_path)
    told = "".join(path.read_text("utf-8", "replace") for path in tmp_path.iterdir())
    assert "geheim" not in told and "DB_PASS=<removed>" in told
    assert '"max_tokens": 400' in told and document["verdict"] == "confirmed"


def test_a_wrong_placeholder_is_named_by_its_place(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("{port} '", "{prot} '").replace("{port}'", "{prot}'"), "utf-8")
    line = next(number for number, line in enumerate(file.read_text("utf-8").splitlines(), 1) if "{prot}" in line)
    result = CliRunner().invoke(app, ["experiment", "run", str(file)])
    assert result.exit_code == 2
    assert f"{file}:{line}: arms.treatment.command: unknown placeholder {{prot}}" in result.stderr.replace("\n", "")


def test_list_and_show() -> None:
    assert "cancelled-streams" in CliRunner().invoke(app, ["experiment", "list"]).stdout
    assert "[[predictions]]" in CliRunner().invoke(app, ["experiment", "show", "cancelled-streams"]).stdout


def test_dry_run_sends_nothing() -> None:
    result = CliRunner().invoke(app, ["storm", "http://127.0.0.1:1", "--dry-run", "--victims", "3"])
    assert result.exit_code == 0
    assert "victim: POST /v1/completions" in result.stdout


def test_the_report_has_each_arms_notes_once(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    noted = copy.deepcopy(document)
    for trial in noted["arms"]["control"]["trials"]:
        trial["notes"] = ["not on the metrics pages, so not watched: waiting"]
    for trial in noted["arms"]["treatment"]["trials"]:
        trial["notes"] = []
    assert len(noted["arms"]["control"]["trials"]) > 1
    print_experiment(noted, None)
    for shown in (html(noted), capsys.readouterr().out):
        assert shown.count("control: not on the metrics pages, so not watched: waiting") == 1
        assert "treatment: not on" not in shown
