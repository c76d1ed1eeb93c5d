"""Ports that nobody else is given before a server has bound them."""

import socket
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
