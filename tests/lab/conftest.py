"""An experiment whose arms are the fake server."""

import asyncio
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.lab.experiment_file import Experiment, parse

SERVER = Path(__file__).with_name("fake_server.py")

EXPERIMENT = """\
name = "fake"
title = "The fake server against itself"
trials = 2
seed = 3

[arms.control]
text = "bystanders are harmed"
command = '{server} --defect bystander-500 --races 2'
log_patterns = {{ race_reports = "WARNING: DATA RACE" }}

[arms.treatment]
command = '{server}'
log_patterns = {{ race_reports = "WARNING: DATA RACE" }}

[storm]
victims = 3
victim = {{ max_tokens = 400 }}
bystanders = 12
later = 4
sample_every = "10ms"
quiet_deadline = "5s"

[[predictions]]
id = "harms"
text = "Control harms somebody in every trial."
arm = "control"
metric = "bystanders.harmed"
operator = ">"
value = 0

[[predictions]]
id = "clean"
text = "Treatment harms nobody."
arm = "treatment"
metric = "bystanders.harmed"
operator = "=="
value = 0

[effect]
metric = "bystanders.harmed"
of = "bystanders.sent"
"""


def server_command(*options: str) -> str:
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(SERVER))} --port {{port}} {shlex.join(options)}".strip()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state; AssertionError when it has not come after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the state did not come")


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Nobody listens there, and nobody else is given it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def text() -> str:
    return EXPERIMENT.format(server=server_command())


@pytest.fixture
def experiment(text: str) -> Experiment:
    return parse(text, "fake.toml")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that only it itself vouches for, with its key in one file."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "/CN=localhost", "IP:127.0.0.1")


def make_certificate(folder: Path, subject: str, names: str = "", days: int = 1) -> Path:
    """Its own authority, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", subject]
    words += ["-addext", f"subjectAltName={names}"] if names else []
    subprocess.run([*words, "-keyout", folder / "key", "-out", folder / "new"], check=True, capture_output=True)
    signed = ["openssl", "x509", "-in", folder / "new", "-signkey", folder / "key", "-days", str(days), "-out", folder / "crt"]
    subprocess.run(signed, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "crt").read_text() + (folder / "key").read_text())
    return both
