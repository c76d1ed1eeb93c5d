"""The live server under a deterministic loop: its client leaves before step k of the loop, for every k.

One run: a server with one slot, a first client that occupies it for a few tokens, a second that asks for many and leaves
before step `leave_at`, by FIN, RST or half-close: in the head, the body, the queue, the prefill, the decode. Soon after, much
sooner than its answer would end, everything must be free: no job, no live sequence, no task, pools whole.

    python -m tests.explore.disconnects [SEEDS]
"""

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tests.explore.deterministic import new_loop, virtual_clock

MECHANISMS = ("fin", "rst", "half_close")
TOKENS = 4
MANY_TOKENS = 2_000
"""Four seconds of decoding."""
QUIET_S = 1.0
STEPS_MORE = 10
"""Leave up to so many steps after the undisturbed run would have ended, to be well into the decode."""
PORT = 8000
_NS = 1_000_000


class Run(NamedTuple):
    seed: int
    mechanism: str
    stream: bool
    leave_at: int
    """Step of the loop. `NEVER`: the client asks for a few tokens and stays."""
    faults: tuple[str, ...] = ()
    """Planted defects of the server."""


class Outcome(NamedTuple):
    steps: int
    left_early: bool
    answer: bytes


NEVER = 1 << 40


def run(spec: Run) -> Outcome:
    """Raises AssertionError for whatever is not free at the end."""
    loop = new_loop(spec.seed)
    seen: list[Outcome] = []
    with virtual_clock(loop):
        loop.run(_scene(loop, spec, seen))
    return seen[0]


async def _scene(loop: Any, spec: Run, seen: list[Outcome]) -> None:
    from uvicorn.server import ServerState

    from windtunnel.serve.server import uvicorn_config
    from windtunnel.serve.state import Server

    server = Server(_config(spec.faults), loop)
    config = uvicorn_config(server.config, server)
    config.load()
    state = ServerState()
    protocol = config.http_protocol_class
    listening = await loop.create_server(
        lambda: protocol(config=config, server_state=state, app_state={}, _loop=loop), None, PORT
    )
    quiet_tasks = len(asyncio.all_tasks())
    first, second = await _Client.connect(), await _Client.connect()
    first.send(stream=True, tokens=TOKENS)
    second.send(stream=spec.stream, tokens=TOKENS if spec.leave_at == NEVER else MANY_TOKENS)
    start = loop.steps

    def leave(step: int) -> None:
        if step == start + spec.leave_at:
            second.leave(spec.mechanism)

    loop.before_step = leave
    answers = await asyncio.gather(first.read(), second.read())
    steps = loop.steps - start
    loop.before_step = lambda _step: None
    first.leave("rst")
    if spec.leave_at == NEVER:
        second.leave("rst")
    await asyncio.sleep(QUIET_S)
    _check_free(server, state, quiet_tasks)
    assert answers[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answers[0][-80:]
    if spec.leave_at == NEVER:
        assert b" 200 OK" in answers[1], answers[1]
    listening.close()
    server.close()
    seen.append(Outcome(steps, second.left_early, answers[1]))


def _config(faults: tuple[str, ...]) -> Any:
    from windtunnel.serve.config import ServeConfig
    from windtunnel.serve.flag_checks import check
    from windtunnel.serve.flags import apply_values

    values = {"scheduler.max_num_seqs": 1, "pacing.ttft_ns": 5 * _NS, "pacing.itl_ns": 2 * _NS, "disable_access_log": True}
    return check(apply_values(replace(ServeConfig(model="wt-model", port=0), seed=1, faults=faults), values))


def _check_free(server: Any, state: Any, quiet_tasks: int) -> None:
    assert len(server.jobs) == 0
    assert not list(server.engine.live())
    assert server.load == 0
    server.engine.check_integrity()
    assert not state.connections
    assert not state.tasks
    assert len(asyncio.all_tasks()) == quiet_tasks, asyncio.all_tasks()


class _Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.left_early = False
        self._ended = False

    @classmethod
    async def connect(cls) -> "_Client":
        return cls(*await asyncio.open_connection("driver", PORT))

    def send(self, *, stream: bool, tokens: int) -> None:
        body = json.dumps(
            {"model": "wt-model", "prompt": "p [wt:7]", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())

    async def read(self) -> bytes:
        """Until the server closes, or nothing where the client has left."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""
        finally:
            self._ended = True

    def leave(self, mechanism: str) -> None:
        self.left_early |= not self._ended
        if mechanism == "half_close":
            if not self._writer.is_closing():
                self._writer.write_eof()
        elif mechanism == "rst":
            self._writer.transport.abort()
        else:
            self._writer.close()


def every_await(seed: int) -> Iterator[Run]:
    """One run for each step of the undisturbed run, mechanism and kind of answer."""
    for stream in (True, False):
        steps = run(Run(seed, "rst", stream, NEVER)).steps
        yield from (Run(seed, how, stream, at) for how in MECHANISMS for at in range(steps + STEPS_MORE))


def main(arguments: list[str]) -> int:
    logging.disable(logging.INFO)
    run(Run(0, "rst", True, NEVER))
    gc.freeze()
    seeds, runs, left = int(arguments[0]) if arguments else 10, 0, 0
    for seed in range(seeds):
        for spec in every_await(seed):
            print(f"\r{spec}", end=" " * 12, file=sys.stderr)
            left += run(spec).left_early
            runs += 1
    print(file=sys.stderr)
    print(f"{runs} runs, {left} clients left early, nothing leaked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
