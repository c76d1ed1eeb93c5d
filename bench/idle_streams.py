"""(c) Memory per idle stream, and 10,000 open streams on one process."""

import resource

from bench.harness import connect, drain, get_json, rss_bytes, send_all, server

STREAMS = 10_000


def run() -> dict[str, float]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    streams = min(STREAMS, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, streams + 200), hard))
    flags = (
        "--itl",
        "1h",
        "--max-num-seqs",
        "20000",
        "--num-gpu-blocks-override",
        "65536",
        "--max-num-batched-tokens",
        "1000000",
    )
    with server(*flags) as (port, pid):
        get_json(port, "/debug/requests")
        before = rss_bytes(pid)
        sockets = connect(port, streams)
        send_all(sockets, 10)
        for _ in drain(sockets, b"data: {"):
            pass
        used = rss_bytes(pid) - before
        live = len(get_json(port, "/debug/requests")["live"])
    assert live == streams, f"{live} of {streams} streams are open"
    return {"open_streams": live, "kib_per_stream": round(used / streams / 1024, 2)}
