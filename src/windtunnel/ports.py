"""Ports for servers that are about to be started.

A port that the kernel has just given to a probe may be given to anybody else until the server binds it, which on a busy machine
takes seconds. So these are below the range from which it gives, and whoever looks for ports on this machine at the same time
gets others: each is marked as taken by a name that ends with the process (Linux's abstract sockets).
"""

import random
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

HOST = "127.0.0.1"
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_LEAST = 1_000
"""With fewer ports below the kernel's range, its own are taken."""
_MARK = "\0windtunnel-port-{}"
_marks: deque[socket.socket] = deque(maxlen=256)
"""The latest: a server that has not bound its port by then never will."""


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment, all different."""
    candidates = _candidates()
    with ExitStack() as held:
        return [_bound(held.enter_context(socket.socket()), candidates) for _ in range(count)]


def free_port() -> int:
    return free_ports(1)[0]


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
        if port and not _mark(port):
            continue
        try:
            probe.bind((HOST, port))
        except OSError:
            if not port:
                raise
        else:
            return int(probe.getsockname()[1])
    raise AssertionError("candidates do not end")


def _mark(port: int) -> bool:
    """Whether nobody else has taken it; always true where there are no abstract sockets."""
    if sys.platform != "linux":
        return True
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(_MARK.format(port))
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    return True
