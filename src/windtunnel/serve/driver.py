"""The real-time driver: one engine, one clock, one alarm.

It sleeps until the engine's next event, advances it, and hands every output to its listener in the same turn of the event
loop: one wake-up for a whole step, not one for each token, and one write for each socket.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from windtunnel.core.engine import Engine
from windtunnel.core.fronted import FrontedEngine
from windtunnel.core.outputs import Refusal, StepOutput, TokenOutput
from windtunnel.core.pacing import Draws, Pacing, is_instant
from windtunnel.core.profile import ProfilePacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import MS
from windtunnel.serve.clock import make_alarm, now_ns

log = logging.getLogger("windtunnel.serve")

_TOKENS_PER_TURN = 1024
_TURN_NS = 4 * MS
"""Writes are held back for a turn, so a turn that has lasted so long starts no further step."""
_IDLE_S = 1.0
_BETWEEN_TURNS_NS = 200_000
"""Deadlines that follow a turn within this time wait for one another: thousands of single tokens a second would otherwise cost
a turn each, and a busy core is late by more than that. Deadlines are absolute, so nobody's mean changes."""


class Cork(Protocol):
    """Holds writes back during a turn (`serve.http11.Cork`)."""

    active: bool

    def release(self) -> None: ...


class Listener(Protocol):
    def on_output(self, output: TokenOutput) -> None: ...

    def broken(self) -> None:
        """`on_output` raised: end the answer with the generic 500."""
        ...


class StepObserver(Protocol):
    """Sees every step whole, before its outputs are delivered (metrics, history, KV-event publisher)."""

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None: ...


class EngineDriver:
    """Owns the engine. All methods run on the event loop's thread."""

    def __init__(
        self, engine: Engine, rank: int, loop: asyncio.AbstractEventLoop, cork: Cork, observers: Sequence[StepObserver]
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.steps = 0
        self.after_turn: Callable[[], None] = _nothing
        """Called whenever the engine has been touched: what it wants to send goes out here (P/D frames)."""
        self._machine: Engine | FrontedEngine = engine
        """The engine, or the engine behind the front end of a profile."""
        self._loop = loop
        self._cork = cork
        self._observers = tuple(observers)
        self._listeners: dict[str, Listener] = {}
        self._alarm = make_alarm(loop, self._run)
        self._instant = False
        self._soon = False
        self._at: int | None = None
        self._turn_ended_ns = 0
        self._run_ns = now_ns()
        """When the engine was last run."""
        self._closed = False
        self._auditor = IdleAuditor(engine, loop)

    def observe(self, observer: StepObserver) -> None:
        """Show this one every step, too, from the next on."""
        self._observers += (observer,)

    def front(self, pacing: Pacing, draws: Draws) -> None:
        """Put the engine behind the front end of its `pacing`, if that has one. What an earlier one holds goes on at once."""
        now, earlier = now_ns(), self._machine
        self._instant = is_instant(pacing)
        self._machine = FrontedEngine(self.engine, pacing, draws) if isinstance(pacing, ProfilePacing) else self.engine
        if isinstance(earlier, FrontedEngine):
            self._show(StepOutput(now, earlier.let_go(now)), now)
            self.wake()

    def submit(self, requests: Sequence[EngineRequest], listeners: Sequence[Listener]) -> Refusal | None:
        """Admit all or none; from then on each listener gets the outputs of its request.

        For the engine they come when they arrived, or when it was last run: their way here costs it no time.
        """
        refusal = self._machine.submit(requests, max(self._run_ns, *(request.arrival_ns for request in requests)))
        if refusal is None:
            self._listeners.update(zip((request.request_id for request in requests), listeners, strict=True))
        self.wake()
        return refusal

    def abort(self, request_ids: Sequence[str], *, notify: bool = False) -> int:
        """End these requests. Without `notify` their listeners hear nothing more."""
        live = self._machine.abort(request_ids, now_ns(), notify=notify)
        if not notify:
            self.forget(request_ids)
        self.wake()
        return live

    def hears(self, request_id: str) -> bool:
        """Somebody still waits for outputs of this request."""
        return request_id in self._listeners

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)

    def wake(self) -> None:
        """Look at the engine again: something about it has changed."""
        self.after_turn()
        at = self._machine.next_event_at()
        if self._closed:
            return
        if at is None:
            self._auditor.idle()
            return
        if at <= now_ns():
            if not self._soon:
                self._soon = True
                self._loop.call_soon(self._run)
            return
        at = max(at, self._turn_ended_ns + _BETWEEN_TURNS_NS)
        if at != self._at:
            self._at = at
            self._alarm.set(at)

    def close(self) -> None:
        self._closed = True
        self._auditor.close()
        self._alarm.close()

    def _run(self) -> None:
        """One turn: what is due at this instant. Whatever falls due meanwhile waits, as the frames of a turn wait for its end.

        An engine that is as fast as possible is late for nobody: there several steps share a turn, and a write.
        """
        self._soon = False
        self._at = None
        if self._closed:
            return
        self._cork.active = True
        try:
            tokens, until_ns = 0, now_ns() + _TURN_NS
            while tokens < _TOKENS_PER_TURN and self._is_due(until_ns):
                made = self._advance()
                if not made or not self._instant:
                    break
                tokens += made
        finally:
            self._cork.release()
        self._turn_ended_ns = now_ns()
        self.wake()

    def _is_due(self, until_ns: int) -> bool:
        at_ns = self._machine.next_event_at()
        return at_ns is not None and at_ns <= now_ns() <= until_ns

    def _advance(self) -> int:
        """Run the engine once; the number of outputs."""
        self._run_ns = started_ns = now_ns()
        outputs = 0
        for step in self._machine.advance(started_ns):
            self._show(step, started_ns)
            outputs += len(step.outputs)
        return outputs

    def _show(self, step: StepOutput, started_ns: int) -> None:
        for observer in self._observers:
            observer.on_step(self.rank, step, started_ns)
        self.steps += step.stats is not None
        if step.outputs:
            self._deliver(step)

    def _deliver(self, step: StepOutput) -> None:
        listeners = self._listeners
        for output in step.outputs:
            listener = listeners.get(output[0])
            if listener is None:
                continue
            if output[2] is not None or output[5] is not None:
                del listeners[output[0]]
            try:
                listener.on_output(output)
            except Exception:
                log.exception("an answer broke while it was written")
                self.abort([output[0]])
                listener.broken()


class IdleAuditor:
    """Checks the engine's books whenever it has been idle for a moment; a leak is one CRITICAL line.

    The check is linear in the KV pool, so the next one waits a hundred times as long as the last one took.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._wait_s = _IDLE_S

    def idle(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(self._wait_s, self._audit)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _audit(self) -> None:
        self._handle = None
        if self._engine.next_event_at() is not None:
            return
        started_s = self._loop.time()
        try:
            self._engine.check_integrity()
        except AssertionError as breach:
            log.critical("the idle engine does not add up: %s", breach)
        self._wait_s = max(_IDLE_S, 100 * (self._loop.time() - started_s))


def _nothing() -> None:
    """What an engine without peers has to send."""
