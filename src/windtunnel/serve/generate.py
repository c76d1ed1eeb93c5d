"""The route of a generating family: read, plan, run, answer. The same code for every family.

The handler owns the request and the response until the head is sent. After that the answer and its encoder write through a
`ChunkSink`; the handler only waits, for the end or for the client's leaving, and closes the chunked body.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from windtunnel.core.outputs import Refusal
from windtunnel.serve.asgi import ClientGone, Receive, Scope, Send, header_of, headers_of, send_bytes
from windtunnel.serve.clock import now_ns
from windtunnel.serve.failures import RETURN_ERROR
from windtunnel.serve.http11 import LINE, ClientLine
from windtunnel.serve.jobs import Job
from windtunnel.serve.orca import ASKED as ORCA
from windtunnel.serve.orca import Header, load_header
from windtunnel.serve.planning import OFF_LOOP_BYTES
from windtunnel.serve.seams import Abort, WriteFailed
from windtunnel.serve.streams import Answer, CollectedAnswer, StreamedAnswer
from windtunnel.wire.family import Family, Generation, Usage, WireError
from windtunnel.wire.http import BAD_REQUEST, DETAIL, parse_json
from windtunnel.wire.output import ChoiceState

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_KEEP_ALIVE_FRAME = b": keep-alive\n\n"
_NO_KEEP_ALIVE = frozenset({"responses", "messages", "generate"})
"""Families without comment frames: vLLM sends them on chat and completions only (§3.1)."""
_LATE_REFUSALS = ("paused",)
"""Found at engine input even for a single sequence: a streamed answer has sent its head by then (§3.8)."""
_BEFORE_THE_HANDLER = (BAD_REQUEST, DETAIL)
"""Kinds of errors about the body as such: FastAPI finds them before any of vLLM's own code runs (§2.6)."""


class GenerateRoute:
    """One family's endpoint."""

    collected: type[CollectedAnswer] = CollectedAnswer

    def __init__(self, server: "Server", family: Family) -> None:
        self._server = server
        self._family = family

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_ns = now_ns()
        try:
            generation = await self._plan(scope, receive)
        except ClientGone:
            return
        except WireError as error:
            await send_bytes(send, error.status, self._family.error_body(error), unread=self._server.unread(receive))
            return
        arrival_ns = scope[LINE].arrived_ns or begun_ns
        self._server.load += 1
        try:
            if generation.stream:
                await self._stream(generation, arrival_ns, scope, send)
            else:
                await self._collect(generation, arrival_ns, scope, send)
        finally:
            self._server.load -= 1

    async def _plan(self, scope: Scope, receive: Receive) -> Generation:
        body = await self._server.body(scope, receive)
        self._server.inject_failure(header_of(scope, RETURN_ERROR))
        plan = partial(self._family.plan, body, headers_of(scope), self._server.env)
        try:
            generation = await planned(self._server, len(body), plan)
            self._check_choices(generation)
        except WireError as error:
            if error.kind not in _BEFORE_THE_HANDLER:
                self._refused(await self._server.planner.run(len(body), partial(kv_transfer_of, body)))
            raise
        return self._server.recorded.attach(generation, body) if self._server.recorded else generation

    def _refused(self, kv_transfer: object) -> None:
        """A prefill may hold blocks for this request, which its engine will never see."""
        if kv_transfer is not None:
            self._server.flavour.refused(self._server, self._family.name, kv_transfer)

    def _check_choices(self, generation: Generation) -> None:
        """Prompts and `n` have limits of their own; their product is what the engine gets. Raises WireError."""
        prompts, n, most = len(generation.prompts), generation.sampling.n, self._server.config.limits.choices
        if prompts * n > most:
            raise WireError(
                f"{prompts} prompts with n={n} are {prompts * n} choices: at most {most} in one request.", param="n"
            )

    async def _collect(self, generation: Generation, arrival_ns: int, scope: Scope, send: Send) -> None:
        line: ClientLine = scope[LINE]
        end = End(self._server.loop)
        choices = self._choices(generation, keep=True)
        answer = self.collected(choices, self._usage(generation), end.set, _counted(generation))
        answer.wants_metrics = self._wants_metrics(choices)
        error = generation.late_error
        if error is not None:
            self._refused(generation.kv_transfer)
        else:
            job = self._submit(generation, answer, choices, arrival_ns)
            if isinstance(job, Refusal):
                self._refused(generation.kv_transfer)
                error = refused(job)
            else:
                await self._wait(job, answer, scope, end)
                error = answer.error
        if line.gone:
            return
        if error is not None:
            await send_bytes(send, error.status, self._family.error_body(error))
        else:
            body = self._family.body(generation, answer.results(), answer.usage)
            await send_bytes(send, 200, body, headers=self._load_report(generation, scope))

    def _submit(self, generation: Generation, answer: Answer, choices: Sequence[ChoiceState], arrival_ns: int) -> Job | Refusal:
        return self._server.jobs.start(generation, answer, choices, arrival_ns)

    def _load_report(self, generation: Generation, scope: Scope) -> list[Header]:
        return load_header(header_of(scope, ORCA), generation.family, self._server.metrics.store)

    async def _stream(self, generation: Generation, arrival_ns: int, scope: Scope, send: Send) -> None:
        """The refusal of a single sequence is a status; everything found later is a frame (§2.8)."""
        line: ClientLine = scope[LINE]
        end = End(self._server.loop)
        choices = self._choices(generation, keep=False)
        sink, stall = self._server.seams.sink(line.sink(self._server.cork)), StallTimer(self._server, line)
        encoder = self._family.encoder(generation)
        answer = StreamedAnswer(choices, self._usage(generation), end.set, encoder, sink, stall, _counted(generation))
        answer.wants_metrics = self._wants_metrics(choices)
        job: Job | Refusal | None = None
        if len(choices) == 1 and generation.late_error is None:
            job = self._submit(generation, answer, choices, arrival_ns)
            if isinstance(job, Refusal) and job.reason not in _LATE_REFUSALS:
                self._refused(generation.kv_transfer)
                await send_bytes(send, job.status, self._family.error_body(refused(job)))
                return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        answer.begin()
        sink.open()
        if generation.late_error is not None:
            answer.fail(generation.late_error)
        elif job is None:
            job = self._submit(generation, answer, choices, arrival_ns)
        if isinstance(job, Refusal):
            answer.fail(refused(job))
        if isinstance(job, Job):
            keep_alive = self._keep_alive(job, answer)
            try:
                await self._wait(job, answer, scope, end)
            finally:
                keep_alive()
        stall.cancel()
        if answer.cut:
            sink.end_cut()
        elif not line.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _keep_alive(self, job: Job, answer: StreamedAnswer) -> Callable[[], None]:
        """Starts the comment frames of a silent stream; the result stops them."""
        if self._family.name in _NO_KEEP_ALIVE:
            return _nothing
        return self._server.keep_alive(answer, partial(_tokens_so_far, job, answer), _KEEP_ALIVE_FRAME)

    async def _wait(self, job: Job, answer: Answer, scope: Scope, end: "End") -> None:
        """Until the answer has ended or the client has gone."""
        line: ClientLine = scope[LINE]
        departure = Departure(self._server, job, answer, end, self._server.seams.write_failed(scope))
        line.on_gone(departure)
        try:
            await end.future
        finally:
            departure()
            self._server.jobs.end(job)

    def _usage(self, generation: Generation) -> Usage:
        """The counts before the first output. What is not cached will have been written: full blocks of each prompt."""
        engine = self._server.config.scheduler
        sizes = [len(prompt.token_ids) for prompt in generation.prompts]
        written = sum(size // engine.block_size * engine.block_size for size in sizes) if engine.enable_prefix_caching else 0
        usage = Usage(sum(sizes), 0, created_cache_tokens=written)
        usage.count_cached(generation.recorded_cached_tokens or 0)
        return usage

    def _wants_metrics(self, choices: list[ChoiceState]) -> bool:
        return self._server.config.enable_per_request_metrics and len(choices) == 1

    def _choices(self, generation: Generation, *, keep: bool) -> list[ChoiceState]:
        sampling, tokenizer, interval = generation.sampling, self._server.env.tokenizer, generation.stream_interval
        return [
            ChoiceState(
                child + at * sampling.n, at, sampling, tokenizer, keep=keep, stream_interval=interval, after=prompt.token_ids
            )
            for at, prompt in enumerate(generation.prompts)
            for child in range(sampling.n)
        ]


def kv_transfer_of(body: bytes) -> object:
    """The `kv_transfer_params` of a body that was refused after it had been read."""
    told = parse_json(body)
    return told.get("kv_transfer_params") if isinstance(told, dict) else None


async def planned(server: "Server", size_bytes: int, plan: Callable[[], Generation]) -> Generation:
    """What `plan` makes of a request. A large one is planned on another thread, with all that is long for a long prompt."""
    if size_bytes < OFF_LOOP_BYTES:
        return plan()
    prepared = server.preparing()
    return await server.planner.run(size_bytes, lambda: prepared(plan()))


class End:
    """The end of one answer, set once. A future is a fifth of the size of an `asyncio.Event`."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Departure:
    """What happens, once, when the client leaves: abort in the engine, drop later output, one log line."""

    __slots__ = ("_answer", "_drop", "_end", "_job", "_report", "_server")

    def __init__(
        self, server: "Server", job: Job, answer: Answer, end: "End", report: WriteFailed, drop: Abort | None = None
    ) -> None:
        """`drop` ends the engine requests; `Jobs.drop` without it."""
        self._server = server
        self._drop = drop or server.jobs.drop
        self._job = job
        self._answer = answer
        self._end = end
        self._report = report

    def __call__(self) -> None:
        if not self._answer.open:
            return
        self._answer.abandon()
        self._server.seams.disconnected(self._drop, self._job.request_ids)
        self._job.settle()
        tokens = self._answer.usage.completion_tokens
        self._report(self._job.response_id, f"after {tokens} tokens" if tokens else "before the first token")
        self._end.set()


class StallTimer:
    """The write deadline of one stream: a reader that stays blocked so long is cut off."""

    __slots__ = ("_handle", "_line", "_server")

    def __init__(self, server: "Server", line: ClientLine) -> None:
        self._server = server
        self._line = line
        self._handle: asyncio.TimerHandle | None = None

    def __call__(self, stalled: bool) -> None:
        self.cancel()
        if stalled:
            self._handle = self._server.loop.call_later(self._server.config.limits.write_deadline_ns / 1e9, self._line.cut)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _nothing() -> None:
    """What stops keep-alive where there is none."""


def _tokens_so_far(job: Job, answer: Answer) -> int:
    """What keep-alive looks at: tokens of the fast lane are counted when they are settled."""
    job.settle()
    return answer.usage.completion_tokens


def refused(refusal: Refusal) -> WireError:
    return WireError(refusal.message, refusal.status, refusal.kind)


def _counted(generation: Generation) -> range:
    """Prompts whose cached tokens a recording has fixed: all of them or none."""
    return range(len(generation.prompts) if generation.recorded_cached_tokens is not None else 0)
