"""The route of a generating family on an SGLang server: when its head leaves, and when a client's leaving is noticed.

SGLang reference §5 and §7.4. A handler that waits for the engine looks for its client only as it wakes: with an output, or
after 4 s without one. An OpenAI stream waits so for its first output; from then on, and on native streams from the start, a
broken connection is noticed at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from windtunnel.core.outputs import Refusal, TokenOutput
from windtunnel.core.sglang.profiles import Profile, profile
from windtunnel.serve.asgi import Receive, Scope, Send, send_bytes
from windtunnel.serve.clock import now_ns
from windtunnel.serve.generate import STREAM_HEADERS, Departure, End, GenerateRoute, StallTimer, refused
from windtunnel.serve.http11 import LINE, ClientLine
from windtunnel.serve.jobs import Job
from windtunnel.serve.orca import Header
from windtunnel.serve.sglang.engines import scaled
from windtunnel.serve.sglang.sessions import Sessions
from windtunnel.serve.streams import Answer, CollectedAnswer, StreamedAnswer
from windtunnel.wire.family import Delta, Family, Generation, WireError
from windtunnel.wire.output import ChoiceState

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

DELAYED_ABORT_NS = 2_000_000_000
"""The background task of a streamed response sleeps so long before it aborts (§5)."""
_EARLY_STATUS = 400
"""Found before the head: a status. Everything else in a stream is an event under 200."""
_ABORTS_DISPATCHED_SINCE = (0, 5, 20)


class WokenAnswer(CollectedAnswer):
    """Tells its handler of every output."""

    woken: Callable[[], None] | None = None

    def on_output(self, choice: ChoiceState, output: TokenOutput) -> None:
        if self.woken is not None:
            self.woken()
        super().on_output(choice, output)


class HeldAnswer(StreamedAnswer):
    """A stream whose head waits. What comes before the head is kept until `start`, each output for itself."""

    early: WireError | None = None
    begun = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queued: list[Delta] = []

    def fail(self, error: WireError) -> None:
        if self.begun or not self.open:
            super().fail(error)
        elif self.early is None:
            self.early = error
            self._stalled(True)

    def _emit(self, delta: Delta) -> None:
        if self.begun:
            super()._emit(delta)
            return
        self._queued.append(delta)
        self._stalled(True)

    def start(self) -> None:
        """The head is out and the sink open: write what was kept."""
        self.begun = True
        self.begin()
        queued, self._queued = self._queued, []
        if not self.open:
            return
        frames = b"".join([self._encoder.delta(delta, self.usage) for delta in queued])
        self._sink.write(frames if self._unfinished else frames + self._encoder.close(self.usage))
        if not self._unfinished:
            self._end()


class FirstOutput:
    """Stands in for the stall timer while there is no head: what is held back then is the first output."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stall: StallTimer) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._stall = stall
        self.woken: Callable[[], None] | None = None

    def __call__(self, stalled: bool) -> None:
        if self.future.done():
            self._stall(stalled)
            return
        self.future.set_result(None)
        if self.woken is not None:
            self.woken()


class Lookout:
    """Notices late that a client has left: with the next output, or as the wait for one times out. Calls `depart` once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, line: ClientLine, interval_ns: int, depart: Callable[[], None]) -> None:
        self._loop = loop
        self._line = line
        self._interval_ns = interval_ns
        self._depart = depart
        self._woken_ns = now_ns()
        self._timer: asyncio.TimerHandle | None = None

    def woken(self) -> None:
        self._woken_ns = now_ns()
        if self._line.gone:
            self.close()
            self._depart()

    def gone(self) -> None:
        """The client has left, which nobody has noticed yet."""
        waited_ns = (now_ns() - self._woken_ns) % self._interval_ns
        self._timer = self._loop.call_later((self._interval_ns - waited_ns) / 1e9, self._depart)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class SglangRoute(GenerateRoute):
    """One family's endpoint."""

    collected = WokenAnswer

    def __init__(self, server: "Server", family: Family, sessions: Sessions) -> None:
        super().__init__(server, family)
        self._sessions = sessions
        self._waits: bool = getattr(family, "waits_for_output", True)
        self._profile: Profile = profile(server.config.sglang.profile)

    async def _plan(self, scope: Scope, receive: Receive) -> Generation:
        generation = await super()._plan(scope, receive)
        turn = generation.extra.get("session")
        return generation if turn is None else self._sessions.join(self._server, generation, turn)

    def _submit(self, generation: Generation, answer: Answer, choices: Sequence[ChoiceState], arrival_ns: int) -> Job | Refusal:
        job = super()._submit(generation, answer, choices, arrival_ns)
        joined = generation.extra.get("joined")
        if joined is not None:
            self._sessions.enter(joined, job if isinstance(job, Refusal) else None)
        return job

    def _load_report(self, generation: Generation, scope: Scope) -> list[Header]:
        """ORCA headers are vLLM's."""
        return []

    async def _stream(self, generation: Generation, arrival_ns: int, scope: Scope, send: Send) -> None:
        line: ClientLine = scope[LINE]
        server, end = self._server, End(self._server.loop)
        choices = self._choices(generation, keep=False)
        sink = server.seams.sink(line.sink(server.cork))
        stall = StallTimer(server, line)
        first = FirstOutput(server.loop, stall)
        encoder = self._family.encoder(generation)
        answer = HeldAnswer(choices, self._usage(generation), end.set, encoder, sink, first)
        job = None if generation.late_error else self._submit(generation, answer, choices, arrival_ns)
        answer.early = refused(job) if isinstance(job, Refusal) else generation.late_error
        try:
            if self._waits and isinstance(job, Job) and not await self._first_output(job, answer, first, scope, end):
                return
            if answer.early is not None and self._waits and answer.early.status == _EARLY_STATUS:
                await send_bytes(send, _EARLY_STATUS, self._family.error_body(answer.early))
                return
            if not first.future.done():
                first.future.set_result(None)
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            sink.open()
            answer.start()
            if answer.early is not None:
                answer.fail(answer.early)
            elif isinstance(job, Job):
                await self._wait(job, answer, scope, end)
        finally:
            if isinstance(job, Job):
                server.jobs.end(job)
            stall.cancel()
        if answer.cut:
            sink.end_cut()
        elif not line.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first_output(self, job: Job, answer: HeldAnswer, first: FirstOutput, scope: Scope, end: End) -> bool:
        """Wait for the engine; False when the client was found to have left meanwhile."""
        depart = self._departure(job, answer, scope, end, self._server.jobs.drop)
        lookout = self._lookout(scope, depart)
        first.woken = lookout.woken
        try:
            await asyncio.wait([first.future, end.future], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lookout.close()
            if not first.future.done():
                depart()
        return answer.open

    async def _wait(self, job: Job, answer: Answer, scope: Scope, end: End) -> None:
        """Until the answer has ended or the client was found to have left."""
        if isinstance(answer, WokenAnswer):
            await self._wait_whole(job, answer, scope, end)
            return
        line: ClientLine = scope[LINE]
        depart = self._departure(job, answer, scope, end, self._stream_drop)
        line.on_gone(depart)
        try:
            await end.future
        finally:
            depart()
            self._server.jobs.end(job)

    async def _wait_whole(self, job: Job, answer: WokenAnswer, scope: Scope, end: End) -> None:
        depart = self._departure(job, answer, scope, end, self._server.jobs.drop)
        lookout = self._lookout(scope, depart)
        answer.woken = lookout.woken
        try:
            await end.future
        finally:
            lookout.close()
            depart()
            self._server.jobs.end(job)

    def _lookout(self, scope: Scope, depart: Callable[[], None]) -> Lookout:
        config, line = self._server.config, scope[LINE]
        interval_ns = scaled(config.sglang.request_state_wait_ns, config.pacing.time_scale)
        lookout = Lookout(self._server.loop, line, interval_ns, depart)
        line.on_gone(lookout.gone)
        return lookout

    def _departure(self, job: Job, answer: Answer, scope: Scope, end: End, drop: Callable[[Sequence[str]], None]) -> Departure:
        return Departure(self._server, job, answer, end, self._server.seams.write_failed(scope), drop)

    def _stream_drop(self, request_ids: Sequence[str]) -> None:
        """What the release does about a broken stream: abort at once, after 2 s, or lose sight of it (P41)."""
        if self._profile.disconnect_loses_state:
            return
        if self._aborts_at_once:
            self._server.jobs.drop(request_ids)
            return
        delay_ns = scaled(DELAYED_ABORT_NS, self._server.config.pacing.time_scale)
        self._server.loop.call_later(delay_ns / 1e9, self._server.jobs.drop, request_ids)

    @property
    def _aborts_at_once(self) -> bool:
        version = tuple(int(part) for part in self._profile.version.split(".post")[0].split("."))
        return version >= _ABORTS_DISPATCHED_SINCE
