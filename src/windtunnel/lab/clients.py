"""Who sends the requests of a storm: this process, or several client processes that this one coordinates.

The storm itself (order, tags, phases, samples, checks) is the same either way: only the sending and reading of one request is
handed out, to the client processes in turns, and comes back as its whole record. So the result is merged exactly: it is made
from the same raw records, with no summary in between. States of the target and the hold gate stay with the coordinator and are
asked for by message.

A client process that ends by itself is reported (`LostClient`), and its requests end as `client_died`: what they saw is
not known.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import windtunnel
from windtunnel.core.units import S
from windtunnel.lab.client import run_request
from windtunnel.lab.leave import Gate, Leave
from windtunnel.lab.messages import (
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
from windtunnel.lab.pipes import ClientsError, Pipe, open_pipes
from windtunnel.lab.plan import StormPlan
from windtunnel.lab.record import Ask, End, LostClient, StreamRecord
from windtunnel.lab.session import Session

CLOCK_ROUNDS = 7
START_PATIENCE_NS = 60 * S
STUCK_AFTER_NS = 10 * S
"""A request's record is due so long after its time-out."""


class Clients(Protocol):
    """Sends requests. `lost` grows when a client process ends before it is told to."""

    lost: list[LostClient]

    async def run(self, ask: Ask, leave: Leave | None = None) -> StreamRecord: ...

    def stages(self) -> Counter[str]:
        """How many open requests are in which stage."""

    async def close(self) -> None: ...


class LocalClients:
    """All requests are sent by this process."""

    def __init__(self, session: Session) -> None:
        self.lost: list[LostClient] = []
        self._session = session

    async def run(self, ask: Ask, leave: Leave | None = None) -> StreamRecord:
        return await run_request(self._session, ask, leave)

    def stages(self) -> Counter[str]:
        return +self._session.stages

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(slots=True)
class _Errand:
    """One request that is at work elsewhere."""

    ask: Ask
    leave: Leave | None
    started_ns: int
    outcome: "asyncio.Future[StreamRecord]"
    counted_in: bool = False
    waiting: "asyncio.Task[None] | None" = None

    def count_in(self) -> None:
        if self.leave is not None and self.leave.gate is not None and not self.counted_in:
            self.counted_in = True
            self.leave.gate.count_in()


class _Peer:
    """One client process, as its coordinator sees it. Owns the errands that it has been given."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.errands: dict[int, _Errand] = {}
        self.stages: Counter[str] = Counter()
        self.reading: asyncio.Task[None] | None = None
        self.alive = True

    def send(self, message: Any) -> None:
        self.pipe.send(encode(message))


class SpreadClients:
    """Hands requests out in turns. Owns the client processes from `start` to `close`."""

    def __init__(self, session: Session) -> None:
        self.lost: list[LostClient] = []
        self._session = session
        self._peers: list[_Peer] = []
        self._numbers, self._gate_numbers = count(), count()
        self._gates: dict[Gate, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, processes: int, on: str) -> None:
        """Raises ClientsError when none of them comes up, or one is of another version. One that ends meanwhile is lost."""
        self._peers = [_Peer(pipe) for pipe in await open_pipes(processes, on)]
        try:
            async with asyncio.timeout(START_PATIENCE_NS / 1e9):
                begun = await asyncio.gather(*(self._begin(peer) for peer in self._peers), return_exceptions=True)
        except TimeoutError:
            raise ClientsError(
                f"not all {processes} client processes were ready within {START_PATIENCE_NS / 1e9:g} s"
            ) from None
        for peer, failure in zip(self._peers, begun, strict=True):
            if isinstance(failure, _Gone):
                await self._lose(peer)
        failures = [failure for failure in begun if failure is not None]
        fatal = [failure for failure in failures if not isinstance(failure, _Gone)]
        if fatal or len(failures) == len(self._peers):
            raise (fatal or failures)[0]

    async def _begin(self, peer: _Peer) -> None:
        ready = await _hear(peer)
        if not isinstance(ready, Ready) or ready.version != windtunnel.__version__:
            found = ready.version if isinstance(ready, Ready) else "something else"
            raise ClientsError(f"{peer.pipe.name} runs windtunnel {found}, this is {windtunnel.__version__}")
        peer.pipe.name += f" (pid {ready.pid} on {ready.host})"
        session = self._session
        start_ns = session.start_ns + await _clock_offset_ns(peer)
        peer.send(Begin(session.target, session.timeout_ns, session.linger_ns, session.kind, start_ns))
        peer.reading = asyncio.ensure_future(self._read(peer))

    async def run(self, ask: Ask, leave: Leave | None = None) -> StreamRecord:
        number = next(self._numbers)
        errand = _Errand(ask, leave, self._session.now_ns(), asyncio.get_running_loop().create_future())
        peer = self._peer_for(number)
        if peer is None:
            return self._died(errand, "no client process is left")
        peer.errands[number] = errand
        self._session.came(ask)
        try:
            bare = replace(leave, wait=None, gate=None) if leave is not None else None
            peer.send(Run(number, ask, bare, self._gate(leave)))
            return await self._outcome(peer, errand)
        except asyncio.CancelledError:
            peer.send(Cancel(number))
            raise
        finally:
            del peer.errands[number]
            self._session.went(ask, self._session.now_ns())
            if errand.waiting is not None:
                errand.waiting.cancel()

    async def _outcome(self, peer: _Peer, errand: _Errand) -> StreamRecord:
        """A client process ends its requests itself when their time is up; one that does not is stuck, and is killed."""
        patience_s = (self._session.timeout_ns + STUCK_AFTER_NS) / 1e9
        await asyncio.wait({errand.outcome}, timeout=patience_s)
        if not errand.outcome.done():
            peer.pipe.kill(f"was killed: no answer within {patience_s:g} s")
        return await errand.outcome

    def stages(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for peer in self._peers:
            total.update(peer.stages)
        return +total

    async def close(self) -> None:
        self._closing = True
        peers = self._peers
        readers = [peer.reading for peer in peers if peer.reading is not None]
        for task in (*readers, *self._tasks):
            task.cancel()
        await asyncio.gather(*readers, *self._tasks, return_exceptions=True)
        await asyncio.gather(*(peer.pipe.close() for peer in peers), return_exceptions=True)

    def _peer_for(self, number: int) -> _Peer | None:
        """By turns; the turn of one that is gone goes to the next."""
        order = (self._peers[(number + further) % len(self._peers)] for further in range(len(self._peers)))
        return next((peer for peer in order if peer.alive), None)

    def _gate(self, leave: Leave | None) -> tuple[int, int] | None:
        gate = leave.gate if leave is not None else None
        if gate is None or gate.is_open:
            return None
        if gate not in self._gates:
            self._gates[gate] = next(self._gate_numbers)
            self._keep(self._tell_open(gate, self._gates[gate]))
        return self._gates[gate], gate.timeout_ns

    async def _tell_open(self, gate: Gate, key: int) -> None:
        await gate.passed()
        del self._gates[gate]
        for peer in self._peers:
            peer.send(Open(key))

    def _keep(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, peer: _Peer) -> None:
        while (frame := await peer.pipe.receive()) is not None:
            self._take(peer, decode(frame))
        await self._lose(peer)

    def _take(self, peer: _Peer, message: Any) -> None:
        if isinstance(message, Stages):
            peer.stages = Counter(message.counts)
            return
        errand = peer.errands.get(message.number)
        if errand is None or errand.outcome.done():
            return
        if isinstance(message, Done):
            self._session.notes.update(dict.fromkeys(message.notes))
            errand.outcome.set_result(message.record)
        elif isinstance(message, AtGate):
            errand.count_in()
        elif isinstance(message, Wait):
            errand.waiting = self._keep(self._wait(peer, message, errand))
        elif isinstance(message, Failed):
            errand.outcome.set_exception(RuntimeError(f"{peer.pipe.name}: {message.text}"))

    async def _wait(self, peer: _Peer, message: Wait, errand: _Errand) -> None:
        assert errand.leave is not None and errand.leave.wait is not None
        peer.send(State(message.number, await errand.leave.wait(errand.ask, message.moment)))

    async def _lose(self, peer: _Peer) -> None:
        """The process is gone: say so, and end what it had at work."""
        peer.alive, peer.stages = False, Counter()
        why = await peer.pipe.why()
        errands = [errand for errand in peer.errands.values() if not errand.outcome.done()]
        self.lost.append(LostClient(peer.pipe.name, why, self._session.now_ns(), len(errands)))
        for errand in errands:
            errand.outcome.set_result(self._died(errand, f"{peer.pipe.name} {why}"))

    def _died(self, errand: _Errand, why: str) -> StreamRecord:
        errand.count_in()
        return StreamRecord(errand.ask, End.CLIENT_DIED, errand.started_ns, self._session.now_ns(), error=why)


class _Gone(ClientsError):
    """A client process ended before it was ready."""


async def _hear(peer: _Peer) -> Any:
    frame = await peer.pipe.receive()
    if frame is None:
        raise _Gone(f"{peer.pipe.name} {await peer.pipe.why()}")
    return decode(frame)


async def _clock_offset_ns(peer: _Peer) -> int:
    """The peer's monotonic clock minus ours, from the fastest of a few round trips.

    Within half a round trip of zero it is zero: processes of one machine share the clock.
    """
    best: tuple[int, int] | None = None
    for _ in range(CLOCK_ROUNDS):
        peer.send(Clock(time.monotonic_ns()))
        answer = await _hear(peer)
        assert isinstance(answer, Clock)
        trip_ns = time.monotonic_ns() - answer.sent_ns
        offset_ns = answer.own_ns - answer.sent_ns - trip_ns // 2
        best = min(best, (trip_ns, offset_ns)) if best else (trip_ns, offset_ns)
    assert best is not None
    return 0 if abs(best[1]) <= best[0] // 2 + 1 else best[1]


async def make_clients(session: Session, plan: StormPlan) -> Clients:
    """Those that the plan asks for, started. Raises ClientsError."""
    if plan.clients == 1 and plan.on == "processes":
        return LocalClients(session)
    spread = SpreadClients(session)
    try:
        await spread.start(plan.clients, plan.on)
    except BaseException:
        await spread.close()
        raise
    return spread
