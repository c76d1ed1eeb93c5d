"""Ports for servers that are about to be started.

A port that the kernel has just given to a probe may be given to anybody else until the server binds it, which on a busy machine
takes seconds. So these are below the range from which it gives.
"""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

HOST = "127.0.0.1"
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_LEAST = 1_000
"""With fewer ports below the kernel's range, its own are taken."""


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment, all different."""
    candidates = _candidates()
    with ExitStack() as held:
        return [_bound(held.enter_context(socket.socket()), candidates) for _ in range(count)]


def _candidates() -> Iterator[int]:
    """In an order of chance, then for ever 0: any that the kernel gives."""
    below = range(_FIRST, _first_given())
    if len(below) >= _LEAST:
        yield from random.SystemRandom().sample(below, _LEAST)
    while True:
        yield 0


def _first_given() -> int:
    try:
        return int(_GIVEN.read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bound(probe: socket.socket, candidates: Iterator[int]) -> int:
    """Raises OSError when not even the kernel has one."""
    for port in candidates:
        try:
            probe.bind((HOST, port))
        except OSError:
            if not port:
                raise
        else:
            return int(probe.getsockname()[1])
    raise AssertionError("candidates do not end")
