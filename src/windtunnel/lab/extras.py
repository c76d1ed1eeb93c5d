"""What a storm looks at beside victims, bystanders and later streams: known answers, the worker behind a router, draining."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from windtunnel.core.units import MS, S
from windtunnel.lab.asks import AskMaker
from windtunnel.lab.client import run_request
from windtunnel.lab.connection import GRPC, How
from windtunnel.lab.leave import Leave
from windtunnel.lab.plan import Moment, Role, Shape, StormPlan, Trigger
from windtunnel.lab.process_facts import alive
from windtunnel.lab.record import DirectCheck, DrainRecord, End, KnownPair, StreamRecord
from windtunnel.lab.sampler import Sampler, ScrapeError, scrape
from windtunnel.lab.session import Session
from windtunnel.lab.target import MetricsUrl, find_context, gauges_of, read_gauges

KNOWN_SHAPE = Shape(prompt_words=8, max_tokens=24)
DIRECT_TOKENS = 20_000
POLL_NS = 20 * MS
TURNS = 150
"""So many polls streams are given to begin before the signal, and to end once the process has ended and its sockets are closed.
Not seconds: what a busy machine does not give to the lab does not count.
"""
DIRECT_ATTEMPTS = 3
"""A worker that frees one of so many at once is not to blame."""


class Extras:
    """Owns the known pairs, the direct check and the drain record of one storm; appends to the storm's streams."""

    def __init__(
        self, session: Session, plan: StormPlan, maker: AskMaker, streams: list[StreamRecord], sampler: Sampler
    ) -> None:
        self.known: list[KnownPair] = []
        self.direct: DirectCheck | None = None
        self.drained: DrainRecord | None = None
        self._session, self._plan, self._maker, self._streams, self._sampler = session, plan, maker, streams, sampler
        self._learnt: list[StreamRecord] = []

    @property
    def front(self) -> bool:
        """Whether the target is a router: one by its own metrics, or not itself one of the metrics sources.

        A gRPC worker has its metrics on another port.
        """
        origin = self._session.target.origin
        if origin.scheme in GRPC:
            return False
        here = (origin.host, origin.port)
        return all(kind.router or (url.origin.host, url.origin.port) != here for url, kind in self._sampler.kinds)

    async def learn(self) -> None:
        """Ask some prompts twice; those that are answered alike twice are known."""
        for _ in range(self._plan.known):
            first = await run_request(self._session, self._maker.ask(Role.KNOWN, 0, replace(KNOWN_SHAPE, api=self._plan.api)))
            second = await run_request(self._session, self._maker.again(first.ask, Role.KNOWN))
            self._streams += [first, second]
            if first.end is second.end is End.FINISHED and first.words == second.words:
                self._learnt.append(first)
        if self._plan.known:
            self._session.notes[
                f"{len(self._learnt)} of {self._plan.known} prompts are answered alike twice at temperature 0;"
                " only those are compared after the storm, word for word"
            ] = None

    async def ask_again(self) -> None:
        for before in self._learnt:
            after = await run_request(self._session, self._maker.again(before.ask, Role.KNOWN))
            self._streams.append(after)
            if after.end is End.FINISHED:
                self.known.append(KnownPair(before.ask.tag, before.words, after.words))

    async def leave_a_worker(self) -> None:
        """Ask the first worker that takes requests without the router, leave, and see how long it runs on."""
        for url, kind in self._sampler.kinds:
            if kind.router:
                continue
            for _ in range(DIRECT_ATTEMPTS):
                left, freed_ns = await self._leave_one(url, kind.cancel_grace_ns)
                if not left:
                    break
                self.direct = DirectCheck(url.origin.url, freed_ns)
                if freed_ns is not None and freed_ns <= kind.cancel_grace_ns:
                    return
            if self.direct is not None:
                return

    async def _leave_one(self, url: MetricsUrl, grace_ns: int) -> tuple[bool, int | None]:
        """Whether a client could leave this worker, and after how long it was free."""
        front = self._session.target
        session = Session(replace(front, origin=url.origin, headers=front.headers_for(url.origin)), 5 * S, 0)
        before = await self._running(url)
        context = await find_context(session.target)
        tokens = DIRECT_TOKENS if context is None else min(DIRECT_TOKENS, context // 2)
        ask = self._maker.ask(Role.VICTIM, 0, Shape(max_tokens=tokens))
        record = await run_request(session, replace(ask, role=Role.PROBE), Leave(How.FIN, Trigger(Moment.TOKENS, 2)))
        if record.end is not End.LEFT or before is None:
            return False, None
        return True, await self._freed(url, before, grace_ns, session)

    async def _freed(self, url: MetricsUrl, before: float, grace_ns: int, session: Session) -> int | None:
        left_ns = session.now_ns()
        while session.now_ns() - left_ns < grace_ns + S:
            running = await self._running(url)
            if running is not None and running <= before:
                return session.now_ns() - left_ns
            await asyncio.sleep(POLL_NS / 1e9)
        return None

    async def _running(self, url: MetricsUrl) -> float | None:
        kind = next(kind for source, kind in self._sampler.kinds if source == url)
        try:
            return read_gauges(await scrape(self._session.target, url), gauges_of(kind, ())).get("running")
        except ScrapeError:
            return None

    async def drain(self, pid: int) -> None:
        """Open streams, send SIGTERM, and see streams and process end. A stream that the server refuses has ended."""
        plan, session = self._plan, self._session
        asks = [self._maker.ask(Role.BYSTANDER, 0, plan.victim) for _ in range(plan.drain)]
        begun = [asyncio.ensure_future(run_request(session, ask)) for ask in asks]
        await self._at_work(begun)
        sent_ns, exited_ns = session.now_ns(), None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        for _ in range(-(-plan.drain_deadline_ns // POLL_NS)):
            await asyncio.sleep(POLL_NS / 1e9)
            if not alive(pid):
                exited_ns = session.now_ns() - sent_ns
                break
        if exited_ns is not None:
            await _some_turns(begun, lambda: not all(task.done() for task in begun))
        done = [task for task in begun if task.done()]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        ends = Counter(task.result().end.value for task in done)
        self.drained = DrainRecord(len(begun), len(begun) - len(done), exited_ns, plan.drain_deadline_ns, dict(ends))

    async def _at_work(self, begun: Sequence["asyncio.Task[StreamRecord]"]) -> None:
        """Until the server has each of these requests: a stream has begun to come, anything else was sent some time ago."""
        stages = self._session.stages
        early = ("incomplete", "sent") if self._plan.victim.stream else ("incomplete",)
        await asyncio.sleep(4 * self._plan.sample_every_ns / 1e9)
        await _some_turns(begun, lambda: any(stages[stage] for stage in early))


async def _some_turns(begun: Sequence["asyncio.Task[StreamRecord]"], wanted: Callable[[], bool]) -> None:
    """While it is wanted, but no more than `TURNS`."""
    for _ in range(TURNS if begun else 0):
        if not wanted():
            return
        await asyncio.wait(begun, timeout=POLL_NS / 1e9)
