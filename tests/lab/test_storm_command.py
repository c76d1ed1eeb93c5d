"""`windtunnel storm` as a process: its face, its files, and its end on Ctrl-C."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from jsonschema import validate
from tests.lab.conftest import until
from tests.lab.fake_server import FakeServer, answer

from windtunnel.cli import compare as compare_command
from windtunnel.cli import report as report_command
from windtunnel.lab.process_facts import alive
from windtunnel.lab.report import schema, storm_html

SMALL = ["--victims", "4", "--bystanders", "6", "--later", "4", "--sample-every", "10ms", "--max-tokens", "400"]
LONG = ["--victims", "6", "--when", "tokens:90000", "--max-tokens", "100000", "--request-timeout", "100s"]
"""Nobody leaves for 90 s at least: an interrupt or a kill comes first."""


@asynccontextmanager
async def fake(*defects: str, itl_s: float = 0.002) -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer(frozenset(defects), itl_s)
    port = await server.start()
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


async def start(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "windtunnel", *words, stdout=pipe, stderr=pipe)


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def storm(*words: str) -> tuple[int, str, str]:
    return await finish(await start("storm", *words))


async def test_a_folder_gets_document_report_and_junit(tmp_path: Path) -> None:
    """And where there is no terminal, the phases get plain lines."""
    async with fake("bystander-500") as (_, url):
        code, out, err = await storm(url, *SMALL, "--out", str(tmp_path))
    assert code == 1
    assert "bystander_error" in out
    document = json.loads((tmp_path / "result.json").read_text())
    validate(document, schema("storm"))
    page = (tmp_path / "report.html").read_text()
    assert "bystander_error" in page and "<svg" in page and "Reproduce this" in page
    assert "http://www.w3.org" not in page and "src=" not in page
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert suite.get("failures") == str(len(document["findings"]))
    lines = err.splitlines()
    assert [line.split("s  ")[1] for line in lines[:3]] == [
        "reading the baseline",
        "victims are leaving",
        "asking as a bystander",
    ]
    assert any("bystander_error (high)" in line for line in lines)
    assert "\x1b" not in err + out


async def test_a_target_with_one_api_is_asked_by_that_one_alone() -> None:
    """Probes, known pairs and bystanders, too; and who names another one is told."""
    async with fake("chat-only") as (server, url):
        code, out, err = await storm(url, *SMALL, "--api", "chat", "--json")
        refused, _, told = await storm(url, *SMALL, "--api", "completions")
    document = json.loads(out)
    assert (code, document["findings"]) == (0, []), err
    assert document["oracle"] and document["bystanders"] == {"sent": 6, "non_200": 0, "harmed": 0, "by_status": {"200": 6}}
    assert server.left == 4
    assert refused == 2 and "does not answer a plain stream by completions" in told and "--api" in told


async def test_report_makes_a_quiet_storms_files_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake() as (_, url):
        code, out, err = await storm(url, *SMALL, "--quiet", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert "clean" in out
    (tmp_path / "report.html").unlink()
    report_command.report(tmp_path)
    assert (tmp_path / "report.html").read_text() == storm_html(json.loads((tmp_path / "result.json").read_text()))
    assert "Clean" in (tmp_path / "report.html").read_text()


async def test_two_storms_are_compared_by_their_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of one storm each are shown and not tested."""
    for name, defects in (("before", ()), ("after", ("bystander-500",))):
        async with fake(*defects) as (_, url):
            await storm(url, *SMALL, "--out", str(tmp_path / name))
    with pytest.raises(typer.Exit) as told:
        compare_command.compare(tmp_path / "before", tmp_path / "after")
    out = capsys.readouterr().out
    assert told.value.exit_code == 1
    assert "finding new: storm bystander_error\n" in out
    assert "bystanders.harmed: 0 → 0.5 (one storm each: not tested)\n" in out
    with pytest.raises(typer.Exit) as told:
        compare_command.compare(tmp_path / "after", tmp_path / "before", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (told.value.exit_code, document["worse"]) == (0, False)
    assert document["findings"] == [{"arm": "storm", "new": [], "gone": ["bystander_error"], "both": []}]


def essence(document: dict[str, Any]) -> dict[str, Any]:
    """What is not a matter of time."""
    kept = ("model", "storm", "victims", "bystanders", "survivors", "later_streams", "findings", "notes", "clients", "target")
    out = {key: document[key] for key in kept}
    out["victims"] = {key: value for key, value in out["victims"].items() if key != "late_ms_max"}
    for role in ("survivors", "later_streams"):
        out[role] = {key: value for key, value in out[role].items() if not key.endswith("_ms")}
    out["findings"] = [(one["name"], one["count"]) for one in out["findings"]]
    return out


@pytest.mark.parametrize("defect", ["short", "lose-word"])
async def test_the_reproduce_command_reproduces(defect: str) -> None:
    async with fake(defect) as (server, url):
        code, out, _ = await storm(url, *SMALL, "--seed", "11", "--set", "survivor.max_tokens=20", "--json")
        first = json.loads(out)
        asked, server.identities = server.identities, []
        server.left = server.harmed = 0
        words = shlex.split(first["reproduce"])
        assert words[0] == "windtunnel"
        again_code, out, _ = await finish(await start(*words[1:]))
    assert code == again_code == 1
    assert essence(json.loads(out)) == essence(first)
    assert sorted(server.identities) == sorted(asked)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("number", "clients"), [(signal.SIGINT, "1"), (signal.SIGINT, "3"), (signal.SIGTERM, "2")])
async def test_a_signal_ends_the_storm_with_what_there_is(number: int, clients: str, tmp_path: Path) -> None:
    async with fake(itl_s=0.001) as (server, url):
        process = await start("storm", url, *LONG, "--clients", clients, "--survivors", "2", "--out", str(tmp_path), "--json")
        await until(lambda: server.running == 8)
        helpers = children(process.pid)
        assert len(helpers) == (int(clients) if clients != "1" else 0)
        process.send_signal(number)
        code, out, err = await finish(process)
        await until(lambda: server.running == 0)
    assert code == 3, err
    document = json.loads(out)
    assert document["interrupted"] == "stopped"
    validate(document, schema("storm"))
    assert json.loads((tmp_path / "result.json").read_text()) == document
    assert "Inconclusive" in (tmp_path / "report.html").read_text()
    assert "skipped" in (tmp_path / "junit.xml").read_text()
    assert gone([process.pid, *helpers])
    assert "Traceback" not in err


async def test_a_terminals_ctrl_c_reaches_no_client_process(tmp_path: Path) -> None:
    """A terminal signals the whole foreground group."""
    async with fake(itl_s=0.001) as (server, url):
        pipe = asyncio.subprocess.PIPE
        words = [sys.executable, "-m", "windtunnel", "storm", url, *LONG, "--clients", "2", "--json"]
        process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, start_new_session=True)
        await until(lambda: server.running == 10)
        assert all(os.getsid(pid) == pid for pid in children(process.pid))
        os.killpg(process.pid, signal.SIGINT)
        code, out, err = await finish(process)
    assert code == 3, err
    assert json.loads(out)["clients"]["lost"] == []
    assert err.count("Traceback") == 0


async def test_client_processes_end_with_a_coordinator_that_is_killed() -> None:
    async with fake(itl_s=0.001) as (server, url):
        process = await start("storm", url, *LONG, "--clients", "2")
        await until(lambda: server.running == 10)
        helpers = children(process.pid)
        assert len(helpers) == 2
        process.kill()
        await finish(process)
        await until(lambda: gone(helpers))
        await until(lambda: server.running == 0)


async def test_a_target_that_never_answers_can_be_left(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.read()
        while await reader.read(1):
            pass
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    async with server:
        process = await start("storm", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await begun.wait()
        process.send_signal(signal.SIGINT)
        code, _, err = await finish(process)
    assert code == 3
    assert "interrupted before the storm began" in err


INTERRUPT_AT_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = {words!r}
from windtunnel.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name", ["windtunnel.cli", "typer", "windtunnel.cli.up", "windtunnel.cli.glue", "pydantic", "windtunnel.lab.target"]
)
async def test_ctrl_c_while_it_starts_is_a_clean_end(name: str) -> None:
    """By the import at which it comes, since a time would be another one on every machine."""
    words = ["storm", "http://127.0.0.1:1", "--json"]
    pipe = asyncio.subprocess.PIPE
    code = INTERRUPT_AT_IMPORT.format(name=name, words=words)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, stderr=pipe)
    assert await finish(process) == (130, "", "windtunnel: interrupted before it began\n")


async def test_a_second_signal_gives_up_at_once() -> None:
    """The drain of a storm waits for nobody who has signalled twice."""
    stuck = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        if path == b"/v1/models":
            await answer(writer, 200, '{"data": [{"id": "m"}]}')
        else:
            stuck.set()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        process = await start("storm", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await stuck.wait()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        code, _, err = await finish(process)
    assert code in (2, 3)
    assert "Traceback" not in err


def take_terminal() -> None:
    """In the child: the slave at its stdin becomes its controlling terminal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def on_terminal(*words: str) -> tuple[asyncio.subprocess.Process, int]:
    """The command on a terminal of its own, and the terminal's other side."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    os.set_blocking(master, False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "windtunnel", *words),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_terminal,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    return process, master


async def ended(process: asyncio.subprocess.Process, master: int, so_far: bytearray) -> str:
    """All that it has shown, once it has ended. It is read all the time: a full terminal holds up whoever writes to it."""
    await until(lambda: bool(shown(master, so_far)) and process.returncode is not None)
    text = shown(master, so_far)
    os.close(master)
    return text


def shown(master: int, so_far: bytearray) -> str:
    with contextlib.suppress(OSError):  # nothing to read, or nobody on the other side any more
        while part := os.read(master, 65_536):
            so_far += part
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", so_far.decode("utf-8", "replace"))


async def test_a_terminal_gets_a_picture_and_its_ctrl_c_ends_everything() -> None:
    seen = bytearray()
    async with fake(itl_s=0.001) as (_, url):
        process, master = await on_terminal("storm", url, *LONG, "--clients", "2", "--survivors", "0")
        await until(
            lambda: {"streaming 6", "running 6 (+6)"} <= set(re.findall(r"streaming 6|running 6 \(\+6\)", shown(master, seen)))
        )
        helpers = children(process.pid)
        assert len(helpers) == 2
        os.write(master, b"\x03")
        text = await ended(process, master, seen)
    assert process.returncode == 3
    assert gone(helpers)
    assert "interrupted: stopped" in text
    assert "Traceback" not in text
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is shown again"


async def test_an_experiment_shows_the_storm_in_hand(text: str, tmp_path: Path) -> None:
    (tmp_path / "fake.toml").write_text(text, "utf-8")
    seen = bytearray()
    process, master = await on_terminal("experiment", "run", str(tmp_path / "fake.toml"), "--trials", "1")
    text = await ended(process, master, seen)
    assert "of 19 requests opened" in text
    assert "control, trial 1" in text
    assert "Traceback" not in text


async def test_a_quiet_experiment_says_only_the_result(text: str, tmp_path: Path) -> None:
    (tmp_path / "fake.toml").write_text(text, "utf-8")
    words = ("experiment", "run", str(tmp_path / "fake.toml"), "--trials", "1", "--aa", "treatment")
    code, out, err = await finish(await start(*words, "--quiet"))
    assert (code, err) == (0, "")
    assert "treatment" in out and "confirmed" in out
