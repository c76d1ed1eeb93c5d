"""What the benchmarks share: a server process on one core, and a client that can keep up with it on another."""

import contextlib
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from windtunnel.ports import free_port

SERVER_CORE, CLIENT_CORE = 0, 1
_READY_TIMEOUT_S = 30
_RECV_BYTES = 1 << 18


def pin(core: int) -> None:
    """Keep this process on one core, where the platform can."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})


def launch(port: int, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "windtunnel", "serve", "bench-model", "--port", str(port), "--disable-access-log", *flags]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=lambda: pin(SERVER_CORE))


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[int, int]]:
    """(port, pid) of a ready server; stopped at the end."""
    port = free_port()
    process = launch(port, flags)
    try:
        wait_ready(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.002)
    raise TimeoutError("the server did not become ready")


def get_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.load(answer)


def stream_request(tokens: int, number: int) -> bytes:
    body = json.dumps(
        {"model": "bench-model", "prompt": f"bench [wt:{number:x}]", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def connect(port: int, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port))
        one.setblocking(False)
        sockets.append(one)
    return sockets


def send_all(sockets: Sequence[socket.socket], tokens: int) -> None:
    for number, one in enumerate(sockets):
        one.sendall(stream_request(tokens, number))


def start_streams(sockets: Sequence[socket.socket], tokens: int, within_s: float) -> None:
    """One by one at random moments, as clients do that know nothing of each other; seed 1."""
    chance = random.Random(1)
    for number, one in enumerate(sockets):
        one.sendall(stream_request(tokens, number))
        time.sleep(chance.expovariate(len(sockets) / within_s))


def drain(sockets: Sequence[socket.socket], until: bytes) -> Iterator[tuple[int, float, bytes]]:
    """(socket number, arrival, data) until `until` has been seen on every socket."""
    selector = selectors.DefaultSelector()
    tails = {}
    for number, one in enumerate(sockets):
        selector.register(one, selectors.EVENT_READ, number)
        tails[number] = b""
    while tails:
        ready = selector.select(timeout=30)
        if not ready:
            raise TimeoutError(f"{len(tails)} sockets have been silent for 30 s")
        for key, _ in ready:
            number = key.data
            data = key.fileobj.recv(_RECV_BYTES)  # type: ignore[union-attr]
            yield number, time.perf_counter(), data
            seen = tails[number] + data
            tails[number] = seen[-len(until) :]
            if until in seen or not data:
                selector.unregister(key.fileobj)
                del tails[number]


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
