"""(a) Tokens per second of one server process on one core, against a bare loopback write loop in the same run.

The bare loop is a process on the same core that does nothing but `os.write` one frame of the same size to each of as many
sockets in turn; the same client reads both.
"""

import os
import socket
import time

from bench.harness import CLIENT_CORE, SERVER_CORE, connect, drain, pin, send_all, server

STREAMS = 128
TOKENS = 3000
FRAME_BYTES = 260
ROUNDS = 3


def run() -> dict[str, float]:
    pin(CLIENT_CORE)
    rates, bare_rates = [], []
    for _ in range(ROUNDS):
        bare_rates.append(_bare_rate())
        rates.append(_server_rate())
    rate, bare = max(rates), max(bare_rates)
    return {"tokens_per_s": round(rate), "bare_writes_per_s": round(bare), "ratio": round(rate / bare, 3)}


def _server_rate() -> float:
    with server("--max-num-seqs", str(STREAMS), "--max-model-len", "8192", "--num-gpu-blocks-override", "65536") as (port, _):
        sockets = connect(port, STREAMS)
        send_all(sockets, TOKENS)
        frames, first, last = 0, 0.0, 0.0
        for _number, at, data in drain(sockets, b"0\r\n\r\n"):
            frames += data.count(b"data: {")
            first = first or at
            last = at
        assert frames == STREAMS * TOKENS, f"{frames} frames of {STREAMS * TOKENS}"
        return frames / (last - first)


def _bare_rate() -> float:
    listener = socket.create_server(("127.0.0.1", 0), backlog=STREAMS)
    child = os.fork()
    if child == 0:
        _write_frames(listener)
    sockets = connect(listener.getsockname()[1], STREAMS)
    frames, first, last = 0, 0.0, 0.0
    for _number, at, data in drain(sockets, b"0\r\n\r\n"):
        frames += data.count(b"data: {")
        first = first or at
        last = at
    os.waitpid(child, 0)
    listener.close()
    assert frames == STREAMS * TOKENS
    return frames / (last - first)


def _write_frames(listener: socket.socket) -> None:
    pin(SERVER_CORE)
    descriptors = [listener.accept()[0].detach() for _ in range(STREAMS)]
    frame = b"%x\r\ndata: {" % FRAME_BYTES + b"x" * (FRAME_BYTES - 10) + b"\n\n\r\n"
    time.sleep(0.1)
    for _ in range(TOKENS):
        for descriptor in descriptors:
            os.write(descriptor, frame)
    for descriptor in descriptors:
        os.write(descriptor, b"0\r\n\r\n")
    time.sleep(0.5)
    os._exit(0)
