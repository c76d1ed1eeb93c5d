"""`windtunnel explore`: exit codes, the JSON document, replay files, the time line."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from windtunnel.cli import explore

app = typer.Typer()
explore.register(app)


@app.callback()
def root() -> None:
    """The lead's root has a callback too."""


MODEL = Path(__file__).with_name("seats.py")


def windtunnel(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explore", *map(str, arguments)])


def test_the_document_of_a_finding(tmp_path: Path) -> None:
    result = windtunnel("run", "kv-status", "--rule", "c", "--json", "--out", tmp_path)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["scenario"] == "kv-status"
    assert document["complete"] is True
    assert document["schedules"] > 0
    first = document["violations"][0]
    assert (first["invariant"], first["number"], first["steps"]) == ("terminal states stick", 1, 5)
    assert len(first["schedule"]) == 5
    assert Path(first["replay"]).is_file()


def test_every_replay_file_breaks_again(tmp_path: Path) -> None:
    document = json.loads(windtunnel("run", "kv-status", "--rule", "b", "--json", "--out", tmp_path).stdout)
    for violation in document["violations"]:
        again = windtunnel("replay", violation["replay"], "--json")
        assert again.exit_code == 1
        story = json.loads(again.stdout)
        assert story["broken"]
        assert [line["number"] for line in story["lines"] if line["breaks"]] == [violation["healed_at"] or violation["steps"]]


def test_the_steps_of_a_replay_show_the_change_of_state(tmp_path: Path) -> None:
    document = json.loads(windtunnel("run", "kv-status", "--rule", "c", "--json", "--out", tmp_path).stdout)
    text = windtunnel("replay", document["violations"][0]["replay"]).stdout
    changes = re.findall(r"room_7.status: (.*)", text)
    assert changes == ["waiting for input → failed", "failed → transferring", "transferring → success"]
    assert "violated: 1 terminal states stick" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("pooled-response", "--owned", "--set", "frames=1"), 0),
        (("pooled-response", "--set", "frames=1"), 1),
        (("kv-status", "--expect", "10,12,13"), 0),
        (("kv-status", "--expect", "1"), 1),
        (("kv-status", "--expect", "first"), 2),
        (("kv-status", "--rule", "z"), 2),
        (("kv-status", "--search", "guess"), 2),
        (("kv-status", "--set", "atomic=maybe"), 2),
        (("kv-status", "--set", "atomic"), 2),
        (("lease-reaper", "--rule", "a"), 2),
        (("no-such-scenario",), 2),
        ((MODEL,), 1),
        ((MODEL, "--set", "locked=true"), 0),
        ((MODEL, "--search", "pct", "--schedules", "50", "--seed", "3"), 1),
    ],
)
def test_exit_codes(arguments: tuple[object, ...], code: int, tmp_path: Path) -> None:
    assert windtunnel("run", *arguments, "--out", tmp_path).exit_code == code


def test_a_replay_of_a_model_that_has_changed_says_so(tmp_path: Path) -> None:
    model = tmp_path / "seats.py"
    model.write_text(MODEL.read_text())
    document = json.loads(windtunnel("run", model, "--json", "--out", tmp_path).stdout)
    model.write_text(MODEL.read_text().replace('"sell"', '"sell it"'))
    result = windtunnel("replay", document["violations"][0]["replay"])
    assert result.exit_code == 2
    assert "the model has changed" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("x = 1", "0 models"),
        ("raise ValueError('no')", "no"),
    ],
)
def test_a_file_that_is_no_model_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(content)
    result = windtunnel("run", file)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"versions": {"format": 99}}'])
def test_a_file_that_is_no_replay_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    assert windtunnel("replay", file).exit_code == 2
    assert windtunnel("replay", tmp_path / "absent.json").exit_code == 2


def test_the_time_line_stands_alone_and_marks_the_write(tmp_path: Path) -> None:
    document = json.loads(windtunnel("run", "kv-status", "--rule", "c", "--json", "--out", tmp_path).stdout)
    file, page = document["violations"][0]["replay"], tmp_path / "page.html"
    windtunnel("replay", file, "--out", page)
    windtunnel("replay", file, "--html")
    html = page.read_text(encoding="utf-8")
    assert Path(file).with_suffix(".html").read_text(encoding="utf-8") == html
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", html)
    marked = re.findall(r'<div class="grid row bad".*?<span class="number">(\d+)</span>', html, re.DOTALL)
    assert marked == ["5"]
    assert "transfer worker" in html
    assert "decode&#39;s pages" in html


def test_the_list_names_parameters() -> None:
    rows = {row["name"]: row for row in json.loads(windtunnel("list", "--json").stdout)}
    assert rows["kv-status"]["parameters"]["rule"]["choices"] == ["a", "b", "c", "d", "e"]
    assert rows["pooled-response"]["parameters"]["owned"]["default"] is False
