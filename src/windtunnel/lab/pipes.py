"""How a coordinator reaches its client processes: a pipe carries frames both ways and says why the other end is gone."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import windtunnel
from windtunnel.core.units import S
from windtunnel.lab.client_process import LENGTH, read_frame
from windtunnel.lab.experiment_file import Environment

CLOSE_PATIENCE_NS = 5 * S
STDERR_TAIL_BYTES = 2_000


class ClientsError(Environment):
    """Client processes that cannot be had as they were asked for: no Ray, no cluster, not enough of it."""


class Pipe(Protocol):
    """Owned by the coordinator (`lab.clients`). What is queued to be sent is bounded by the storm's limit of concurrency."""

    name: str

    def send(self, frame: bytes) -> None:
        """Never waits; frames to an end that is gone are dropped."""

    async def receive(self) -> bytes | None:
        """The next frame, or None once the other end is gone."""

    async def why(self) -> str:
        """After the end: how it ended."""

    def kill(self, why: str) -> None:
        """End the other side at once; `why` is then how it ended."""

    async def close(self) -> None:
        """End the other side, and wait until it has ended."""


class ProcessPipe:
    """A process of this machine. It has a session of its own, so that a terminal's Ctrl-C reaches the coordinator only."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.name = f"client process {number}"
        self._process = process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._in, self._out = process.stdin, process.stdout
        self._errors = bytearray()
        self._killed: str | None = None
        self._draining = asyncio.ensure_future(self._drain(process.stderr))

    @classmethod
    async def start(cls, number: int) -> "ProcessPipe":
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-m", "windtunnel.lab.client_process")
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=_environment()
        )
        return cls(number, process)

    def send(self, frame: bytes) -> None:
        if not self._in.is_closing():
            self._in.write(LENGTH.pack(len(frame)) + frame)

    async def receive(self) -> bytes | None:
        try:
            return await read_frame(self._out)
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def why(self) -> str:
        status = await self._process.wait()
        await self._draining
        if self._killed is not None:
            return self._killed
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        tail = self._errors.decode("utf-8", "replace").strip()
        return f"ended with exit status {status}" + (f": {tail}" if tail else "")

    def kill(self, why: str) -> None:
        self._killed = why
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Its stdin ends, so it does; after the patience it is killed."""
        self._in.close()
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_NS / 1e9):
                await self._process.wait()
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await self._draining

    async def _drain(self, errors: asyncio.StreamReader) -> None:
        while part := await errors.read(65_536):
            self._errors = (self._errors + part)[-STDERR_TAIL_BYTES:]


def _environment() -> dict[str, str]:
    """Ours, with the place that this very package was imported from first."""
    here = str(Path(windtunnel.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


async def open_pipes(count: int, on: str) -> Sequence[Pipe]:
    """`count` client processes, started. Raises ClientsError."""
    if on == "ray":
        from windtunnel.lab.ray_pipe import ray_pipes

        return await ray_pipes(count)
    return [await ProcessPipe.start(number) for number in range(1, count + 1)]
