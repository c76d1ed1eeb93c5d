"""Ports that nobody else is given before a server has bound them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from windtunnel import ports


def test_they_differ_and_are_not_of_those_that_the_kernel_gives() -> None:
    first = ports._first_given()
    found = ports.free_ports(8)
    assert len(set(found)) == 8
    if first - ports._FIRST < ports._LEAST:
        pytest.skip(f"the kernel gives ports from {first} on")
    assert all(ports._FIRST <= port < first for port in found)


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.create_server((ports.HOST, 0)) as taken, socket.socket() as probe:
        port = taken.getsockname()[1]
        assert ports._bound(probe, iter((port, 0))) != port


@pytest.mark.parametrize("told", ["1024\t60999\n", "", "?"])
def test_where_the_kernel_gives_nearly_all_they_are_its_own(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(told, "ascii")
    monkeypatch.setattr(ports, "_GIVEN", tmp_path / "range")
    assert next(ports._candidates()) == 0
    assert len(set(ports.free_ports(3))) == 3


LOOK = "from windtunnel.ports import free_ports; print(*free_ports(200), flush=True); input()"


@pytest.mark.skipif(sys.platform != "linux", reason="no abstract sockets")
def test_nobody_else_gets_them_while_their_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both draw from a thousand ports, of which one process has two hundred."""
    monkeypatch.setattr(ports, "_first_given", lambda: 11_000)
    look = LOOK.replace(";", "; from windtunnel import ports; ports._first_given = lambda: 11_000;", 1)
    with subprocess.Popen([sys.executable, "-c", look], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = set(ports.free_ports(200)) | set(ports.free_ports(20))
        other.stdin.close()
    assert len(theirs) == 200 and len(ours) == 220
    assert not ours & theirs
