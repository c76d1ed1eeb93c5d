"""What the gRPC services of both engines share: from a planned generation to messages, over the jobs that HTTP uses, too.

A cancelled call, a passed deadline and a vanished client all cancel the method's task: that is the departure of the client, and
aborts its requests in the engine at once.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from windtunnel.core.outputs import Refusal
from windtunnel.serve.clock import now_ns
from windtunnel.serve.failures import RETURN_ERROR
from windtunnel.serve.fetched import FetchedAnswer
from windtunnel.serve.generate import Departure, End, planned, refused
from windtunnel.serve.jobs import Job
from windtunnel.serve.seams import log_disconnect
from windtunnel.serve.streams import Answer, CollectedAnswer
from windtunnel.wire.family import ChoiceResult, Delta, Generation, Usage, WireError
from windtunnel.wire.output import ChoiceState

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

_FAMILY = "grpc"
_NO_BODY = b"{}"
"""Recorded answers to a whole HTTP body never match a message; those to a prompt do."""


class MessageEncoder(Protocol):
    """Writes the messages of one answer. Owns its spec and its own state, and nothing else."""

    def messages(self, delta: Delta, usage: Usage) -> Sequence[Any]:
        """What goes out for one delta of a stream; serialised already where that is cheaper."""
        ...

    def whole(self, result: ChoiceResult, usage: Usage) -> Any:
        """The one message of a choice that is not streamed."""
        ...


MakeEncoder = Callable[[Any], MessageEncoder]
"""From the generation's spec."""


async def generate(
    server: "Server",
    call: Any,
    request: Any,
    plan: Callable[[], Generation],
    make: MakeEncoder,
    kv_transfer: Callable[[], object] = lambda: None,
) -> None:
    """Plan, run and answer one request. Raises WireError for what is refused and for what fails.

    `kv_transfer` reads the request's parameters even where it cannot be planned: a prefill may hold blocks for it.
    """
    arrival_ns = now_ns()
    inject_failure(server, call)
    try:
        generation = await planned(server, request.ByteSize(), plan)
    except WireError:
        _tell_refused(server, kv_transfer())
        raise
    if server.recorded:
        generation = server.recorded.attach(generation, _NO_BODY)
    server.load += 1
    try:
        await (_stream if generation.stream else _whole)(server, generation, arrival_ns, call, make(generation.spec))
    finally:
        server.load -= 1


def inject_failure(server: "Server", call: Any) -> None:
    """Raises WireError for a call that is to fail on purpose, by the server's rate or by its own metadata."""
    metadata: Mapping[str, str] = {key: value for key, value in call.invocation_metadata() or () if key == RETURN_ERROR}
    server.inject_failure(metadata.get(RETURN_ERROR))


async def _stream(server: "Server", generation: Generation, arrival_ns: int, call: Any, encoder: MessageEncoder) -> None:
    choices = _choices(server, generation, keep=False)
    answer = FetchedAnswer(choices, _usage(generation), server.loop, _counted(generation))
    job, leave = _started(server, generation, answer, choices, arrival_ns, End(server.loop))
    writer = Writer(server, call)
    try:
        while await answer.more():
            while (delta := answer.take()) is not None:
                await writer.write(encoder.messages(delta, answer.usage))
    except asyncio.CancelledError:
        writer.explain()
        raise
    finally:
        writer.close()
        leave()
        server.jobs.end(job)
    if answer.error is not None:
        raise answer.error


async def _whole(server: "Server", generation: Generation, arrival_ns: int, call: Any, encoder: MessageEncoder) -> None:
    answer = await collected(server, generation, arrival_ns)
    writer = Writer(server, call)
    try:
        await writer.write(encoder.whole(result, answer.usage) for result in answer.results())
    except asyncio.CancelledError:
        writer.explain()
        raise
    finally:
        writer.close()


class Writer:
    """Hands messages to the transport, which makes it wait while the reader is slow; cuts a reader that is blocked too long.

    A timer that looks every now and then is a tenth of the price of a timeout around each message.
    """

    def __init__(self, server: "Server", call: Any) -> None:
        self._loop = server.loop
        self._call = call
        self._deadline_s = server.config.limits.write_deadline_ns / 1e9
        self._task = asyncio.current_task()
        self._since_s: float | None = None
        self._cut = False
        self._timer = self._loop.call_later(self._deadline_s, self._look)

    async def write(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._since_s = self._loop.time()
            await self._call.write(message)
        self._since_s = None

    def explain(self) -> None:
        """In place of the cancellation of a reader that was cut: raises WireError."""
        if self._cut and self._task is not None and self._task.uncancel() == 0:
            raise WireError(f"The client has not read for {self._deadline_s:g} s", 429) from None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        blocked_s = 0.0 if self._since_s is None else self._loop.time() - self._since_s
        if blocked_s < self._deadline_s:
            self._timer = self._loop.call_later(self._deadline_s - blocked_s, self._look)
        elif self._task is not None:
            self._cut = True
            self._task.cancel()


async def collected(server: "Server", generation: Generation, arrival_ns: int) -> CollectedAnswer:
    """The finished answer. Raises the WireError with which it ended."""
    end = End(server.loop)
    choices = _choices(server, generation, keep=True)
    answer = CollectedAnswer(choices, _usage(generation), end.set, _counted(generation))
    job, leave = _started(server, generation, answer, choices, arrival_ns, end)
    try:
        await end.future
    finally:
        leave()
        server.jobs.end(job)
    if answer.error is not None:
        raise answer.error
    return answer


def _started(
    server: "Server", generation: Generation, answer: Answer, choices: Sequence[ChoiceState], arrival_ns: int, end: End
) -> tuple[Job, Departure]:
    """The job at work, and what to do when its client leaves. Raises WireError when the engine refuses it."""
    job = server.jobs.start(generation, answer, choices, arrival_ns)
    if isinstance(job, Refusal):
        _tell_refused(server, generation.kv_transfer)
        raise refused(job)
    return job, Departure(server, job, answer, end, log_disconnect)


def _tell_refused(server: "Server", kv_transfer: object) -> None:
    """Before its engine knows of a request (smg-grpc-servicer 0.14.1, `_notify_kv_transfer_rejected`)."""
    if kv_transfer is not None:
        server.flavour.refused(server, _FAMILY, kv_transfer)


def _choices(server: "Server", generation: Generation, *, keep: bool) -> list[ChoiceState]:
    interval, tokenizer, prompt = generation.stream_interval, server.env.tokenizer, generation.prompts[0].token_ids
    return [
        ChoiceState(child, 0, generation.sampling, tokenizer, keep=keep, stream_interval=interval, after=prompt)
        for child in range(generation.sampling.n)
    ]


def _usage(generation: Generation) -> Usage:
    return Usage(len(generation.prompts[0].token_ids), 0, generation.recorded_cached_tokens or 0)


def _counted(generation: Generation) -> range:
    """A recording that fixes the cached tokens fixes those of the one prompt."""
    return range(generation.recorded_cached_tokens is not None)


async def send_tokenizer(server: "Server", _request: Any, call: Any) -> None:
    """The tokenizer's files as a zip, in pieces; the digest of all of it comes with the last one."""
    from windtunnel.serve.tokenizer_bundle import bundle, pieces

    for message in pieces(await asyncio.to_thread(bundle, server.config.tokenizer)):
        await call.write(message)


async def no_kv_events(_server: "Server", _request: Any, _call: Any) -> None:
    raise WireError("KV cache events are not served over gRPC", 501, "NotImplementedError")
