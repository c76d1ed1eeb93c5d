"""The named seams at which planted defects attach.

With no fault switched on every seam is the plain behaviour below and no module of `windtunnel.faults` is imported. A fault is a
class with a `NAME`, and an `attach(seams)` that returns other seams.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from windtunnel.faults.catalogue import find

log = logging.getLogger("windtunnel.serve")

AsgiApp = Callable[[Any, Any, Any], Any]
Abort = Callable[[Sequence[str]], None]


class WriteFailed(Protocol):
    """Called once for each stream whose client has gone, with what the log line needs."""

    def __call__(self, answer_id: str, phase: str) -> None: ...


def log_disconnect(answer_id: str, phase: str) -> None:
    log.info("client of %s has gone (%s): aborted, later output dropped", answer_id, phase)


def disconnect_aborts(abort: Abort, request_ids: Sequence[str]) -> bool:
    """The client has gone: end its requests in the engine. True when that was done."""
    abort(request_ids)
    return True


def plain_app(app: AsgiApp) -> AsgiApp:
    return app


def as_it_is(value: Any) -> Any:
    return value


def reporter_of(_scope: Any) -> WriteFailed:
    return log_disconnect


@dataclass(frozen=True, slots=True)
class Seams:
    """Where a defect can be planted in the live server."""

    wrap_app: Callable[[AsgiApp], AsgiApp] = plain_app
    """Around the whole ASGI application: how request and response objects are made."""
    write_failed: Callable[[Any], WriteFailed] = reporter_of
    """From the handler's ASGI scope: what a stream does about a failed write. The stream only gets the result."""
    disconnected: Callable[[Abort, Sequence[str]], bool] = disconnect_aborts
    """What a client's leaving does to its requests."""

    engine_config: Callable[[Any], Any] = as_it_is
    """From the engine's settings to those that it gets."""
    engine: Callable[[Any], Any] = as_it_is
    """Around the engine, as the driver and the operator routes see it."""
    metrics: Callable[[Any], Any] = as_it_is
    """Around the metrics: what is counted when a request ends."""
    disagg_config: Callable[[Any], Any] = as_it_is
    """From a P/D worker's settings to those that it gets."""
    transfer_backend: Callable[[Any], Any] = as_it_is
    """Around the transport of each prefill rank."""
    connected: Callable[[Any], Any] = as_it_is
    """From a P/D worker whose connections stand, before the first request."""
    sink: Callable[[Any], Any] = as_it_is
    """Around the `Sink` of a stream: what happens to its frames on their way out."""
    family: Callable[[Any], Any] = as_it_is
    """Around each API family: how a request is read and which frames a stream has."""

    def with_(self, **changes: Any) -> "Seams":
        return replace(self, **changes)

    def around(self, **wrappers: Callable[[Any], Any]) -> "Seams":
        """Wrap what the named seams give so far, so that several faults can stand around one thing."""
        chained: dict[str, Any] = {name: _chain(getattr(self, name), wrapper) for name, wrapper in wrappers.items()}
        return replace(self, **chained)


def _chain(inner: Callable[[Any], Any], outer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: outer(inner(value))


class Fault(Protocol):
    NAME: str

    def attach(self, seams: Seams) -> Seams: ...


def resolve(text: str) -> Fault:
    """The defect that `NAME` or `NAME:VALUE` means. Raises ValueError that says what is wrong."""
    entry, value = find(text)
    module = importlib.import_module(f"windtunnel.faults.{entry.module}")
    try:
        fault: Fault = module.FAULT.with_option(value) if value else module.FAULT
    except ValueError as error:
        prefix = f"{entry.name}:{value}: "
        raise ValueError(f"{prefix}{str(error).removeprefix(prefix)} ({entry.option})") from None
    return fault


def pair_of(text: str) -> str:
    """The kind of P/D pair whose servers can have the defect that `NAME` or `NAME:VALUE` means; empty: any server."""
    return find(text)[0].pair


def load(names: Sequence[str]) -> Seams:
    """The seams with these faults attached. Raises ValueError as `resolve` does."""
    seams = Seams()
    for name in names:
        seams = resolve(name).attach(seams)
        log.warning("fault switched on: %s", name)
    return seams
