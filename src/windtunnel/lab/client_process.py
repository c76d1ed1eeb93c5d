"""One of several client processes of a storm: it sends the requests that its coordinator hands out, and returns their records.

Run as a module it speaks frames (four bytes of length, then a pickled message) on stdin and stdout and ends with its stdin, so
that no client outlives its coordinator. On Ray the same object lives in an actor (`lab.ray_pipe`).
"""

import asyncio
import os
import platform
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import windtunnel
from windtunnel.core.units import MS
from windtunnel.lab.client import run_request
from windtunnel.lab.leave import Gate, Leave
from windtunnel.lab.messages import (
    FRAME_LIMIT_BYTES,
    AtGate,
    Begin,
    Cancel,
    Clock,
    Done,
    Failed,
    Open,
    Ready,
    Run,
    Stages,
    State,
    Wait,
    decode,
    encode,
)
from windtunnel.lab.plan import Moment
from windtunnel.lab.record import Ask
from windtunnel.lab.session import Session

LENGTH = struct.Struct(">I")
STAGES_EVERY_NS = 200 * MS


class ClientProcess:
    """Owns the requests at work here, by number. `receive` takes a frame of the coordinator, `send` gives it one."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send_frame = send
        self._session: Session | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, asyncio.Future[str]] = {}
        self._gates: dict[int, asyncio.Event] = {}
        self._telling: asyncio.Task[None] | None = None
        self._send(Ready(windtunnel.__version__, platform.python_version(), os.getpid(), platform.node()))

    def _send(self, message: Any) -> None:
        self._send_frame(encode(message))

    def receive(self, frame: bytes) -> None:
        message = decode(frame)
        _RECEIVERS[type(message)](self, message)

    def clock(self, message: Clock) -> None:
        self._send(replace(message, own_ns=time.monotonic_ns()))

    def begin(self, message: Begin) -> None:
        self._session = Session(message.target, message.timeout_ns, message.linger_ns, message.start_ns, kind=message.kind)
        self._telling = asyncio.ensure_future(self._tell_stages(self._session))

    def run(self, message: Run) -> None:
        task = asyncio.ensure_future(self._follow(message))
        self._requests[message.number] = task
        task.add_done_callback(lambda _task: self._requests.pop(message.number, None))

    def cancel(self, message: Cancel) -> None:
        if message.number in self._requests:
            self._requests[message.number].cancel()

    def state(self, message: State) -> None:
        waiting = self._states.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.name)

    def open(self, message: Open) -> None:
        opened = self._gates.pop(message.gate, None)
        if opened is not None:
            opened.set()

    async def _follow(self, message: Run) -> None:
        assert self._session is not None, "Begin comes before Run"
        try:
            record = await run_request(self._session, message.ask, self._leave(message))
            self._send(Done(message.number, record, tuple(self._session.notes)))
        except Exception:  # noqa: BLE001  # an error of ours must reach the person who runs the storm
            self._send(Failed(message.number, traceback.format_exc()))

    def _leave(self, message: Run) -> Leave | None:
        if message.leave is None:
            return None
        gate = None
        if message.gate is not None:
            key, timeout_ns = message.gate
            opened = self._gates.setdefault(key, asyncio.Event())
            gate = _FarGate(opened, timeout_ns, partial(self._send, AtGate(message.number)))
        return replace(message.leave, wait=partial(self._wait, message.number), gate=gate)

    async def _wait(self, number: int, _ask: Ask, moment: Moment) -> str:
        self._states[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Wait(number, moment))
            return await self._states[number]
        finally:
            del self._states[number]

    async def _tell_stages(self, session: Session) -> None:
        told: Mapping[str, int] = {}
        while True:
            await asyncio.sleep(STAGES_EVERY_NS / 1e9)
            counts = dict(session.stages)
            if counts != told:
                told = counts
                self._send(Stages(counts))

    async def close(self) -> None:
        """End everything at work here."""
        tasks = [*self._requests.values(), *([self._telling] if self._telling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.links.close()


class _FarGate(Gate):
    """One request's side of a gate whose count the coordinator keeps; all requests of one gate here share `opened`."""

    def __init__(self, opened: asyncio.Event, timeout_ns: int, tell: Callable[[], None]) -> None:
        super().__init__(0, timeout_ns, opened)
        self._tell = tell

    def count_in(self) -> None:
        self._tell()


_RECEIVERS: Mapping[type, Callable[[ClientProcess, Any], None]] = {
    Clock: ClientProcess.clock,
    Begin: ClientProcess.begin,
    Run: ClientProcess.run,
    Cancel: ClientProcess.cancel,
    State: ClientProcess.state,
    Open: ClientProcess.open,
}


async def main() -> None:
    """Until stdin ends. What anybody prints goes to stderr: stdout belongs to the frames."""
    frames_out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, frames_out)
    client = ClientProcess(lambda frame: writer.write(LENGTH.pack(len(frame)) + frame))
    try:
        while True:
            client.receive(await read_frame(reader))
    except asyncio.IncompleteReadError:
        await client.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError at the end, and ValueError for a frame over the limit."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_LIMIT_BYTES:
        raise ValueError(f"a frame of {length} bytes between lab processes; the limit is {FRAME_LIMIT_BYTES}")
    return await reader.readexactly(length)


if __name__ == "__main__":
    asyncio.run(main())
