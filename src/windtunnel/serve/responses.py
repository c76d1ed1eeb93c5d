"""The routes of stored responses: background runs, retrieval, cancelling (vLLM reference §2.7, §3.5)."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from windtunnel.core.outputs import Refusal
from windtunnel.serve.asgi import Receive, Scope, Send, send_bytes
from windtunnel.serve.generate import STREAM_HEADERS, GenerateRoute, refused
from windtunnel.serve.http11 import LINE, ClientLine
from windtunnel.serve.stored import BackgroundRun, EventLog
from windtunnel.serve.streams import StreamedAnswer
from windtunnel.wire.env import Stored
from windtunnel.wire.family import Generation, WireError
from windtunnel.wire.http import dumps, parameter_error
from windtunnel.wire.vllm import responses

if TYPE_CHECKING:
    from windtunnel.serve.state import Server


class ResponsesRoute(GenerateRoute):
    """POST /v1/responses: as every family, and with `background` a run of its own."""

    async def _collect(self, generation: Generation, arrival_ns: int, scope: Scope, send: Send) -> None:
        if not generation.spec.background:
            await super()._collect(generation, arrival_ns, scope, send)
            return
        queued = responses.response_value(generation.spec, "queued")
        started = self._start(generation, arrival_ns, queued)
        if isinstance(started, WireError):
            await send_bytes(send, started.status, self._family.error_body(started))
        else:
            await send_bytes(send, 200, dumps(queued))

    async def _stream(self, generation: Generation, arrival_ns: int, scope: Scope, send: Send) -> None:
        if not generation.spec.background:
            await super()._stream(generation, arrival_ns, scope, send)
            return
        started = self._start(generation, arrival_ns, responses.response_value(generation.spec, "queued"))
        if isinstance(started, WireError):
            await send_bytes(send, started.status, self._family.error_body(started))
        else:
            await follow(started.log, 0, scope, send)

    def _start(self, generation: Generation, arrival_ns: int, queued: Mapping[str, object]) -> BackgroundRun | WireError:
        """Submit a run whose events go to a log. An error found at engine input is reported like a refusal."""
        server = self._server
        if generation.late_error is not None:
            return generation.late_error
        choices = self._choices(generation, keep=False)
        log = EventLog()
        run = BackgroundRun(log)
        responses.keep(generation.spec, queued)

        def ended() -> None:
            if run.job is not None:
                server.jobs.end(run.job)
            if answer.error is None:
                log.close()

        answer = StreamedAnswer(choices, self._usage(generation), ended, self._family.encoder(generation), log, _never_stalled)
        run.answer = answer
        answer.begin()
        job = server.jobs.start(generation, answer, choices, arrival_ns)
        if isinstance(job, Refusal):
            answer.fail(refused(job))
            return refused(job)
        run.job = job
        if not answer.open:
            server.jobs.end(job)
        server.background.add(generation.response_id, run)
        return run


def _never_stalled(_stalled: bool) -> None:
    """A log takes everything at once."""


async def follow(log: EventLog, start: int, scope: Scope, send: Send) -> None:
    """Stream a log's events from number `start` on; the run goes on without its readers."""
    line: ClientLine = scope[LINE]
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    reader = Reader(log, start, send)
    line.on_gone(reader.stop)
    await reader.run()


class Reader:
    """One client that reads a log; ends when the log does or when the client leaves."""

    def __init__(self, log: EventLog, start: int, send: Send) -> None:
        self._events = log.follow(start)
        self._send = send
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._task = asyncio.ensure_future(self._copy())
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _copy(self) -> None:
        async for frame in self._events:
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class RetrieveRoute:
    """GET /v1/responses/{response_id}?stream=&starting_after=: the stored value, or the events of its background run."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stored = responses.find(scope["path_params"]["response_id"], self._server.env)
            streamed, after = _query(scope)
        except WireError as error:
            await send_bytes(send, error.status, responses.error_body(error))
            return
        run = self._server.background.get(stored.body["id"])
        if streamed and run is not None:
            await follow(run.log, after + 1, scope, send)
        else:
            await send_bytes(send, 200, dumps(stored.body))


def _query(scope: Scope) -> tuple[bool, int]:
    """(`stream`, `starting_after`); without the latter -1, so that event 0 is the first."""
    values = parse_qs(scope["query_string"].decode("latin-1"))
    streamed = values.get("stream", ["false"])[-1].lower() in ("true", "1", "yes", "on")
    after = values.get("starting_after", ["-1"])[-1]
    try:
        return streamed, int(after)
    except ValueError:
        raise parameter_error("`starting_after` must be the number of an event", "starting_after", after) from None


class CancelRoute:
    """POST /v1/responses/{response_id}/cancel."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, body = 200, self._cancel(scope["path_params"]["response_id"])
        except WireError as error:
            status, body = error.status, responses.error_body(error)
        await send_bytes(send, status, body)

    def _cancel(self, response_id: str) -> bytes:
        server = self._server
        stored = responses.find(response_id, server.env)
        responses.check_cancellable(stored)
        run = server.background.get(response_id)
        if run is None or not run.open or run.answer is None or run.job is None:
            return dumps(stored.body)
        run.answer.abandon()
        server.jobs.drop(run.job.request_ids)
        server.jobs.end(run.job)
        cancelled = {**stored.body, "status": "cancelled"}
        server.stored.put(response_id, Stored(cancelled, stored.messages))
        return dumps(cancelled)
