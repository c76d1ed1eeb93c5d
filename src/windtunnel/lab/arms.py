"""An arm's server: started fresh on a free port in a process group of its own, waited for, and always stopped.

Only processes that were started here are ever signalled: their group, and whoever carries the arm's mark in its environment.
"""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.core.units import MS, S, format_duration, parse_duration_ns
from windtunnel.lab.connection import GRPC, ConnectionCut, MalformedResponse, Origin, fetch, parse_origin
from windtunnel.lab.experiment_file import Arm, Environment
from windtunnel.lab.target import plain_origin
from windtunnel.ports import free_ports

Result = TypeVar("Result")
READY_POLL_NS = 50 * MS
TERM_PATIENCE_NS = 5 * S
EXIT_POLL_NS = 50 * MS
EXIT_TRIES = 100
"""On a busy machine a process that ended may take so long, five seconds, from the end of its sockets to its parent."""
LOG_TAIL_BYTES = 2_000
LOG_LIMIT_BYTES = 16 * 1024 * 1024
"""What a server writes beyond is dropped."""
LOG_LIMIT_NOTE = f"the server's log was cut at its limit of {LOG_LIMIT_BYTES >> 20} MiB"
LOG_POLL_NS = 100 * MS
MARK = "WINDTUNNEL_ARM"
"""In the environment of every process of an arm."""
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Stopped(Exception):
    """The run was stopped while a server was being waited for."""


async def unless_stopped(work: Coroutine[Any, Any, Result], stop: asyncio.Event) -> Result:
    """What `work` returns. Raises Stopped, with the work cancelled, when `stop` is set before."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    url: str
    log: Path | None
    """Its stdout and stderr together; None for a server that was running already."""
    pid: int | None = None
    """The process that was started here."""
    port: int = 0
    more_ports: tuple[int, ...] = (0, 0, 0)
    """The ports for the arm's command (`{port}`; `{port2}`, `{port3}`, `{port4}`)."""
    process: asyncio.subprocess.Process | None = None

    async def exit_status(self) -> int | None:
        """The status with which the server has ended by itself; None while it runs, or was not started here.

        One that accepts connections runs.
        """
        if self.process is None:
            return None
        for _ in range(EXIT_TRIES):
            if self.process.returncode is not None or await _accepts(self.url):
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_POLL_NS / 1e9):
                    await self.process.wait()
        return self.process.returncode


async def _accepts(url: str) -> bool:
    """Or is too busy to."""
    origin = parse_origin(url)
    try:
        async with asyncio.timeout(EXIT_POLL_NS / 1e9):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True


def fill(template: str, *, port: int, time_scale: float, seed: int, more_ports: Sequence[int] = (0, 0, 0)) -> str:
    """`{port}` to `{port4}`, `{seed}`, `{python}`, `{time_scale}`, durations (`{20ms}`, divided by it). Raises ValueError."""
    values = {
        "port": str(port),
        **{f"port{number}": str(one) for number, one in enumerate(more_ports, 2)},
        "seed": str(seed),
        "python": sys.executable,
        "time_scale": f"{time_scale:g}",
    }

    def one(found: re.Match[str]) -> str:
        name = found[1]
        if name in values:
            return values[name]
        try:
            return format_duration(round(parse_duration_ns(name) / time_scale))
        except ValueError:
            known = ", ".join(f"{{{key}}}" for key in values)
            raise ValueError(f"unknown placeholder {{{name}}}: write one of {known} or a duration such as {{20ms}}") from None

    return _PLACEHOLDER.sub(one, template)


@asynccontextmanager
async def running(
    arm: Arm, log: Path, *, time_scale: float, seed: int, stop: asyncio.Event | None = None
) -> AsyncIterator[Running]:
    """The arm's server while the block runs. Raises Environment when it cannot be started or does not become ready.

    Raises Stopped when `stop` is set before it is ready.
    """
    stop = stop or asyncio.Event()
    if arm.url is not None:
        await _wait_ready(ready_url(arm), arm, None, log, stop)
        yield Running(arm.url, None)
        return
    assert arm.command is not None
    port, *more = free_ports(4)
    filled = partial(fill, port=port, more_ports=more, time_scale=time_scale, seed=seed)
    words = [filled(word) for word in shlex.split(arm.command)]
    mark = f"{os.getpid()}-{port}"
    process = await _start(words, arm.env, log, mark)
    cutting = asyncio.create_task(_keep_short(log))
    try:
        ready = filled(arm.ready_url or "http://127.0.0.1:{port}/health")
        await _wait_ready(ready, arm, process, log, stop)
        origin = parse_origin(ready)
        base = filled(arm.target) if arm.target else f"{origin.scheme}://{origin.authority}"
        yield Running(base, log, process.pid, port, tuple(more), process)
    finally:
        cutting.cancel()
        try:
            await end(process)
        finally:
            kill_marked(mark)
            _finish_log(log)


def ready_url(arm: Arm) -> str:
    """Where a server that is running already answers 200 by HTTP/1.1; a gRPC worker's metrics do."""
    assert arm.url is not None
    if arm.ready_url:
        return arm.ready_url
    origin = parse_origin(arm.url)
    if origin.scheme not in GRPC:
        return plain_origin(origin).url
    return arm.metrics_urls[0].partition("?")[0] if arm.metrics_urls else f"http://{origin.authority}/metrics"


async def _keep_short(log: Path) -> None:
    """The server appends, so what is cut off gives its room back while it writes on."""
    while True:
        await asyncio.sleep(LOG_POLL_NS / 1e9)
        _cut(log)


def _cut(log: Path) -> bool:
    if log.stat().st_size <= LOG_LIMIT_BYTES:
        return False
    os.truncate(log, LOG_LIMIT_BYTES)
    return True


def _finish_log(log: Path) -> None:
    if log.exists() and (_cut(log) or log.stat().st_size == LOG_LIMIT_BYTES):
        with log.open("ab") as out:
            out.write(f"\n{LOG_LIMIT_NOTE}\n".encode())


def is_cut(log: Path) -> bool:
    """Whether the log of a server that has ended says that it was cut."""
    return log.exists() and log.stat().st_size > LOG_LIMIT_BYTES


async def _start(words: list[str], env: Mapping[str, str], log: Path, mark: str) -> asyncio.subprocess.Process:
    with log.open("ab") as out:
        out.truncate(0)
        try:
            return await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env, MARK: mark},
                start_new_session=True,
            )
        except OSError as error:
            raise Environment(f"cannot start {shlex.join(words)}: {error}") from error


async def _wait_ready(url: str, arm: Arm, process: asyncio.subprocess.Process | None, log: Path, stop: asyncio.Event) -> None:
    origin = parse_origin(url)
    root = replace(origin.root, trust=arm.tls.trust)
    why = None
    try:
        async with asyncio.timeout(arm.ready_timeout_ns / 1e9):
            while why := await _why_not(root, origin.prefix or "/"):
                if process is not None and process.returncode is not None:
                    raise Environment(f"the server exited with {process.returncode} before it was ready{_tail(log)}")
                if stop.is_set():
                    raise Stopped
                await asyncio.sleep(READY_POLL_NS / 1e9)
    except TimeoutError:
        last = f" ({why})" if why else ""
        raise Environment(
            f"{url} did not answer 200 within {format_duration(arm.ready_timeout_ns)}{last}{_tail(log)}"
        ) from None


async def _why_not(origin: Origin, path: str) -> str | None:
    """None for a server that is ready."""
    try:
        answer = await fetch(origin, "GET", path, {})
    except (OSError, ConnectionCut, MalformedResponse) as error:
        return str(error) or type(error).__name__
    return None if answer.status == 200 else f"status {answer.status}"


async def end(process: asyncio.subprocess.Process) -> None:
    """End the whole group: SIGTERM, then SIGKILL for what is left. Safe to cancel: then SIGKILL comes at once."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        async with asyncio.timeout(TERM_PATIENCE_NS / 1e9):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def kill_marked(mark: str) -> list[int]:
    """End what is left of an arm (Linux): a process that made a session of its own still has the mark in its environment."""
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                killed.append(int(entry.parent.name))
                os.kill(killed[-1], signal.SIGKILL)
    return killed


def _signal_group(pgid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pgid, number)


def count_patterns(log: Path | None, patterns: Mapping[str, str]) -> dict[str, int]:
    """How often each pattern matches a line of the log."""
    counts = dict.fromkeys(patterns, 0)
    if log is None or not log.exists():
        return counts
    compiled = {name: re.compile(pattern) for name, pattern in patterns.items()}
    with log.open("rb") as source:
        for line in source.read(LOG_LIMIT_BYTES).decode("utf-8", "replace").splitlines():
            for name, pattern in compiled.items():
                counts[name] += bool(pattern.search(line))
    return counts


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    text = log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    return f"; the end of its log:\n{text}" if text else ""
