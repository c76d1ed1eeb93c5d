"""(e) From 500 simultaneous disconnects to quiet metrics, in engine steps of 10 ms."""

import socket
import struct
import time

from bench.harness import connect, drain, get_json, send_all, server

STREAMS = 500


def run() -> dict[str, float]:
    flags = (
        "--pacing",
        "step",
        "--step-base",
        "10ms",
        "--step-prefill-token",
        "0",
        "--step-decode-seq",
        "0",
        "--max-num-seqs",
        "1000",
    )
    with server(*flags, "--num-gpu-blocks-override", "65536", "--max-num-batched-tokens", "100000") as (port, _):
        sockets = connect(port, STREAMS)
        send_all(sockets, 100_000 // STREAMS * 100)
        for _ in drain(sockets, b"data: {"):
            pass
        before = get_json(port, "/debug/requests")
        assert len(before["live"]) == STREAMS
        started = time.perf_counter()
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        closed = time.perf_counter()
        while (after := get_json(port, "/debug/requests"))["live"]:
            pass
        quiet = time.perf_counter()
    return {
        "steps_until_quiet": after["steps"] - before["steps"],
        "closing_took_ms": round(1e3 * (closed - started), 1),
        "quiet_after_ms": round(1e3 * (quiet - started), 1),
    }
