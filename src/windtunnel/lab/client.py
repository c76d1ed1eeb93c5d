"""One generation request, from its first byte to its end, with an exact record of what the client saw."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from windtunnel.lab.connection import GRPC, HTTP2, Connection, ConnectionCut, How, MalformedResponse, fetch
from windtunnel.lab.dialects import DIALECTS
from windtunnel.lab.plan import Api, Moment, Trigger
from windtunnel.lab.record import Ask, End, Lag, StreamRecord
from windtunnel.lab.target import Target

if TYPE_CHECKING:
    from windtunnel.lab.grpc_client import GrpcCall, GrpcPool
    from windtunnel.lab.http2 import Http2Pool, Http2Stream

FRAME_LIMIT_BYTES = 4 * 1024 * 1024
ERROR_TEXT_LIMIT = 300


@dataclass(slots=True)
class Session:
    """What the requests of one storm share. Owned by the storm; requests only count themselves in and out."""

    target: Target
    timeout_ns: int
    linger_ns: int
    start_ns: int = field(default_factory=time.monotonic_ns)
    clients: int = 0
    """Sequences that open requests have asked for; n counts n times."""
    asked: int = 0
    """The same of all requests so far."""
    opened: int = 0
    kind: str = "unknown"
    """The engine kind: it decides the route by which requests are aborted."""
    notes: dict[str, None] = field(default_factory=dict)
    """What whoever reads the result should know, once each."""
    last_closed_ns: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    """How many open requests are in which stage (`incomplete`, `sent`, `head`, `tokens`)."""
    lags: list[Lag] = field(default_factory=list)
    """When the lab itself was late (`pulse`)."""

    links: "Links" = field(init=False)

    def __post_init__(self) -> None:
        self.links = Links(self.target)

    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    def came(self, ask: Ask) -> None:
        """A request is about to be sent, here or by another process of the lab."""
        self.clients += ask.n
        self.asked += ask.n
        self.opened += 1

    def went(self, ask: Ask, ended_ns: int) -> None:
        self.clients -= ask.n
        self.last_closed_ns = max(self.last_closed_ns, ended_ns)


@dataclass(frozen=True, slots=True)
class Leave:
    """How and when this client leaves. `wait` returns in a state that only the target knows, with the state's name."""

    how: How
    when: Trigger
    wait: Callable[[Ask, Moment], Awaitable[str]] | None = None
    gate: "Gate | None" = None
    stall_ns: int = 0
    """How long a client that stops reading stays."""

    @property
    def by_itself(self) -> bool:
        """The protocol ends the request; nothing is to be waited for and nothing to be done."""
        return self.how is How.DEADLINE


class Gate:
    """Lets nobody go before all have come. Whoever ends early counts as come; after `timeout_ns` everybody may go."""

    def __init__(self, expected: int, timeout_ns: int, opened: asyncio.Event | None = None) -> None:
        self._missing = expected
        self.timeout_ns = timeout_ns
        self._open = opened or asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def count_in(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._open.set()

    async def passed(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_ns / 1e9):
                await self._open.wait()
        except TimeoutError:
            self._open.set()


def request_body(target: Target, ask: Ask) -> bytes:
    """The JSON of a request, as it is sent."""
    return json.dumps({**DIALECTS[ask.api].body(target.model, ask), "stream": ask.stream}).encode()


def described(target: Target, ask: Ask) -> str:
    """A request in one line, as it would be sent; of a gRPC worker's kind and tokens nothing is known beforehand."""
    if target.origin.scheme in GRPC:
        return f"Generate {ask.request_id} stream={ask.stream} n={ask.n} max_tokens={ask.max_tokens} {ask.prompt!r}"
    return f"POST {target.path(ask.api)} {request_body(target, ask).decode()}"


async def run_request(session: Session, ask: Ask, leave: Leave | None = None) -> StreamRecord:
    """Send one request and follow it to its end, or leave it as `leave` says. Every failure of the target is a value."""
    recorder = _Recorder(session, ask)
    session.came(ask)
    try:
        async with asyncio.timeout(session.timeout_ns / 1e9):
            await _exchange(session, recorder, leave)
    except TimeoutError:
        recorder.failed(End.TIMEOUT, f"no end within {session.timeout_ns / 1e9:g} s")
    except ConnectionCut as error:
        recorder.failed(End.CUT, str(error))
    except MalformedResponse as error:
        recorder.failed(End.MALFORMED, str(error))
    except OSError as error:
        recorder.failed(End.REFUSED, str(error))
    finally:
        session.went(ask, session.now_ns())
        session.stages[recorder.stage] -= 1
        if leave is not None and leave.gate is not None and not recorder.at_gate:
            leave.gate.count_in()
    return recorder.record()


def request_headers(target: Target, ask: Ask) -> Mapping[str, str]:
    """The target's headers and the request's id, unless the person who runs the storm has given one."""
    own = {"x-request-id": ask.request_id} if ask.request_id else {}
    return {**own, **target.headers}


async def _exchange(session: Session, recorder: "_Recorder", leave: Leave | None) -> None:
    connection = await session.links.open(leave)
    try:
        if leave is not None and leave.when.moment is Moment.INCOMPLETE:
            await connection.send(recorder.ask, whole=False)
            await _go(connection, recorder, leave, None)
            return
        await connection.send(recorder.ask)
        recorder.enter("sent")
        reading = asyncio.ensure_future(connection.read(recorder))
        try:
            await (reading if leave is None or leave.by_itself else _until_leaving(connection, recorder, leave, reading))
        finally:
            await _cancelled(reading)
    finally:
        connection.leave(How.FIN)
        await connection.closed()


_AT_ONCE = frozenset({How.FIN, How.RST, How.KILL, How.RST_STREAM})
"""Ways of leaving that need nothing to be waited for."""


async def _until_leaving(connection: "Link", recorder: "_Recorder", leave: Leave, reading: asyncio.Future[None]) -> None:
    if leave.gate is None and leave.how in _AT_ONCE and leave.when.moment in (Moment.TOKENS, Moment.END):
        await _leave_while_reading(connection, recorder, leave, reading)
        return
    due = asyncio.ensure_future(_due(recorder, leave))
    try:
        await asyncio.wait({due, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
        else:
            await due
            await _go(connection, recorder, leave, reading)
    finally:
        await _cancelled(due)


async def _leave_while_reading(connection: "Link", recorder: "_Recorder", leave: Leave, reading: asyncio.Future[None]) -> None:
    """Leaves inside the reading of the token that it waits for: a thousand clients do not queue for a turn of the loop."""

    def go() -> None:
        recorder.due()
        recorder.left(leave.how)
        connection.leave(leave.how)

    recorder.tokens_wanted = _tokens_wanted(recorder.ask, leave.when)
    recorder.on_enough = go
    await reading


def _tokens_wanted(ask: Ask, when: Trigger) -> int:
    return when.count if when.moment is Moment.TOKENS else ask.max_tokens - when.count


async def _due(recorder: "_Recorder", leave: Leave) -> None:
    """Returns when this client is in the state in which it leaves."""
    moment = leave.when.moment
    if moment in (Moment.TOKENS, Moment.END):
        recorder.tokens_wanted = _tokens_wanted(recorder.ask, leave.when)
        await recorder.enough.wait()
    elif moment is Moment.HEAD:
        await recorder.head_seen.wait()
    elif moment is Moment.AFTER:
        await asyncio.sleep(leave.when.after_ns / 1e9)
    elif moment.of_target and leave.wait is not None:
        recorder.target_state = await leave.wait(recorder.ask, moment)
    if leave.gate is not None:
        recorder.at_gate = True
        leave.gate.count_in()
        await leave.gate.passed()
    recorder.due()


async def _go(connection: "Link", recorder: "_Recorder", leave: Leave, reading: asyncio.Future[None] | None) -> None:
    if leave.how is How.STOP_READING and reading is not None:
        await _cancelled(reading)
        connection.stop_reading()
        await asyncio.sleep(leave.stall_ns / 1e9)
    recorder.left(leave.how)
    if leave.how is How.ABORT_ID:
        await connection.abort(recorder)
    else:
        connection.leave(leave.how)
    if leave.how in (How.HALF_CLOSE, How.ABORT_ID) and reading is not None:
        recorder.gone_ns = recorder.session.now_ns()
        await asyncio.wait({reading}, timeout=recorder.session.linger_ns / 1e9)


_ABORT_ROUTES: Mapping[str, tuple[tuple[str, Callable[[str], dict[str, Any]]], ...]] = {
    "sglang": (("/abort_request", lambda request_id: {"rid": request_id}),),
    "vllm": (
        ("/abort_requests", lambda request_id: {"request_ids": [request_id]}),
        ("/inference/v1/abort_requests", lambda request_id: {"request_ids": [request_id]}),
    ),
}
"""Engine kind → routes that abort by id, tried in turn (vLLM reference §1.3 and §1.4, SGLang reference §5)."""


async def _abort_by_id(recorder: "_Recorder") -> None:
    """Ask the target to abort this request. vLLM wants the engine's id: for completions that is `ID-0` (reference §1.4)."""
    session, ask = recorder.session, recorder.ask
    kind = session.kind if session.kind in _ABORT_ROUTES else "vllm"
    prefix = {Api.COMPLETIONS: "cmpl-", Api.CHAT: "chatcmpl-", Api.RESPONSES: "resp_"}.get(ask.api, "")
    request_id = recorder.response_id or prefix + ask.request_id
    if kind == "vllm" and ask.api is Api.COMPLETIONS:
        request_id += "-0"
    root = replace(session.target.origin.root, scheme=session.target.plain.scheme)
    for path, body in _ABORT_ROUTES[kind]:
        if (await fetch(root, "POST", path, session.target.headers, body(request_id))).status == 200:
            return
    session.notes["no abort route answered with 200: victims that should have been aborted by id only stopped"] = None


async def _cancelled(task: asyncio.Future[None]) -> None:
    """End a task of our own; what it raised belongs to whoever awaited it before."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Link(Protocol):
    """The way of one request to the target, whatever is spoken there."""

    async def send(self, ask: Ask, *, whole: bool = True) -> None: ...

    async def read(self, recorder: "_Recorder") -> None:
        """The answer to its end. Raises ConnectionCut, MalformedResponse or OSError."""
        ...

    async def abort(self, recorder: "_Recorder") -> None:
        """Have the request aborted by its id."""
        ...

    def stop_reading(self) -> None: ...

    def leave(self, how: How) -> None: ...

    async def closed(self) -> None:
        """After `leave`: what belongs to this request alone is gone."""
        ...


class HttpLink:
    """One exchange of HTTP/1.1 or HTTP/2."""

    def __init__(self, target: Target, exchange: "Connection | Http2Stream") -> None:
        self._target = target
        self._exchange = exchange

    async def send(self, ask: Ask, *, whole: bool = True) -> None:
        target, headers = self._target, request_headers(self._target, ask)
        await self._exchange.request(target.origin, target.path(ask.api), headers, request_body(target, ask), whole=whole)

    async def read(self, recorder: "_Recorder") -> None:
        await _read(self._exchange, recorder)

    async def abort(self, recorder: "_Recorder") -> None:
        await _abort_by_id(recorder)

    def stop_reading(self) -> None:
        self._exchange.stop_reading()

    def leave(self, how: How) -> None:
        self._exchange.leave(how)

    async def closed(self) -> None:
        await self._exchange.closed()


class GrpcLink:
    """One call."""

    def __init__(self, target: Target, call: "GrpcCall") -> None:
        self._target = target
        self._call = call

    async def send(self, ask: Ask, *, whole: bool = True) -> None:
        assert whole, "plans are checked"
        self._call.begin(ask, request_headers(self._target, ask))

    async def read(self, recorder: "_Recorder") -> None:
        await self._call.read(recorder)

    async def abort(self, recorder: "_Recorder") -> None:
        await self._call.abort(recorder.ask.request_id)

    def stop_reading(self) -> None:
        """Nothing to do: what nobody takes keeps the stream's window shut."""

    def leave(self, how: How) -> None:
        self._call.leave(how)

    async def closed(self) -> None:
        await self._call.closed()


class Links:
    """Owns what the requests to one target share: nothing for HTTP/1.1, otherwise connections or a channel."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http2: Http2Pool | None = None
        self._grpc: GrpcPool | None = None

    async def open(self, leave: Leave | None) -> Link:
        """Raises OSError when nothing answers there."""
        origin, how = self._target.origin, leave.how if leave is not None else None
        if origin.scheme in GRPC:
            from windtunnel.lab.grpc_client import GrpcPool

            self._grpc = self._grpc or GrpcPool(origin)
            deadline_s = leave.when.after_ns / 1e9 if leave is not None and leave.how is How.DEADLINE else None
            return GrpcLink(self._target, await self._grpc.open(how, deadline_s))
        if origin.scheme in HTTP2:
            from windtunnel.lab.http2 import Http2Pool

            self._http2 = self._http2 or Http2Pool(origin)
            return HttpLink(self._target, await self._http2.open(how))
        return HttpLink(self._target, await (Connection.open_in_process if how is How.KILL else Connection.open)(origin))

    async def close(self) -> None:
        for pool in (self._http2, self._grpc):
            if pool is not None:
                await pool.close()


async def _read(connection: "Connection | Http2Stream", recorder: "_Recorder") -> None:
    head = await connection.head()
    recorder.head(head.status)
    if recorder.ask.stream and (head.status == 200 or "event-stream" in head.headers.get("content-type", "")):
        await _read_stream(connection.parts(head), recorder)
    elif head.status == 200:
        recorder.whole_answer(await connection.body(head))
    else:
        recorder.error = _shorten(await connection.body(head))
    if head.status != 200:
        recorder.ended(End.ERROR_STATUS, error=recorder.error or f"with a stream of {len(recorder.words())} words")


async def _read_stream(parts: AsyncIterator[bytes], recorder: "_Recorder") -> None:
    buffer = b""
    async for part in parts:
        *frames, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(buffer) > FRAME_LIMIT_BYTES:
            raise MalformedResponse(f"an SSE frame over {FRAME_LIMIT_BYTES} bytes")
        for frame in frames:
            recorder.frame(frame)
    recorder.stream_over(rest=buffer)


def _shorten(body: bytes) -> str:
    return body[:ERROR_TEXT_LIMIT].decode("utf-8", "replace")


class _Recorder:
    """Collects what one request sees. Owned by `run_request`; `record` makes the frozen value."""

    def __init__(self, session: Session, ask: Ask) -> None:
        self.session = session
        self.ask = ask
        self.stage = "incomplete"
        session.stages[self.stage] += 1
        self.target_state: str | None = None
        """The state that the target was last seen in; words may have come since."""
        self.enough = asyncio.Event()
        self.on_enough: Callable[[], None] | None = None
        self.head_seen = asyncio.Event()
        self.tokens_wanted = 0
        self.at_gate = False
        self._started_ns = session.now_ns()
        self._status: int | None = None
        self._head_ns: int | None = None
        self._frame_ns: list[int] = []
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._done = False
        self._end: End | None = None
        self.error: str | None = None
        self._left: tuple[str, int, int, str] | None = None
        self._due_ns: int | None = None
        self._finished: set[int] = set()
        self._reader = DIALECTS[ask.api].reader()
        self.response_id: str | None = None
        self.gone_ns: int | None = None
        """Where it leaves before its connection ends."""

    @property
    def state(self) -> str:
        return f"tokens:{len(self._frame_ns)}" if self._frame_ns else self.stage

    def enter(self, stage: str) -> None:
        self.session.stages[self.stage] -= 1
        self.session.stages[stage] += 1
        self.stage = stage

    def head(self, status: int) -> None:
        self._status = status
        self._head_ns = self.session.now_ns()
        self.enter("head")
        self.head_seen.set()

    def frame(self, frame: bytes) -> None:
        """One SSE frame: comments and events without data mean nothing here."""
        lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return
        data = b"\n".join(lines)
        if data == b"[DONE]":
            self._done = True
            return
        payload = self._reader.event(_object(data))
        self._done = self._done or bool(payload.get("done"))
        if payload.get("error") is not None:
            self._end = End.ERROR_FRAME
            self.error = _shorten(data)
        self.response_id = self.response_id or payload.get("id")
        for choice in payload.get("choices") or ():
            self.choice(choice)

    def choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        if choice.get("finish_reason"):
            self._finished.add(index)
        if index or (self._left is not None and self.on_enough is not None):
            return
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
        if text:
            self._texts.append(text)
            if not self._frame_ns:
                self.enter("tokens")
            self._frame_ns.append(self.session.now_ns())
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if self.tokens_wanted and len(self._frame_ns) >= self.tokens_wanted:
            self.enough.set()
            if self.on_enough is not None and self._left is None:
                self.on_enough()

    def whole_answer(self, body: bytes) -> None:
        payload = self._reader.whole(_object(body, or_list=self.ask.api is Api.GENERATE))
        for choice in payload.get("choices") or ():
            self.choice(choice)
        self._done = True
        self.stream_over(rest=b"")

    def terminated(self) -> None:
        """The terminator of a stream has come."""
        self._done = True

    def stream_over(self, rest: bytes) -> None:
        if self._end is End.ERROR_FRAME:
            self.error = f"{self.error}{'' if self._done else ' (and no terminator)'}"
        elif rest.strip():
            self.ended(End.UNTERMINATED, error="the body ends inside a frame")
        elif self._finish_reason and self._done and len(self._finished) >= self.ask.n:
            self._end = End.FINISHED
        elif self._done and not self._frame_ns:
            self.ended(End.EMPTY, error="the terminator and nothing else")
        else:
            missing = "terminator" if not self._done else f"finish reason ({len(self._finished)} of {self.ask.n})"
            self.ended(End.UNTERMINATED, error=f"the body ends without {missing} after {len(self._frame_ns)} frames of text")

    def ended(self, end: End, *, error: str) -> None:
        self._end = end
        self.error = error

    def failed(self, end: End, error: str) -> None:
        """What went wrong on the connection, unless this client had left before."""
        if self._left is None:
            self.ended(end, error=f"{error} (state {self.state})")

    def due(self) -> None:
        self._due_ns = self.session.now_ns()

    def left(self, how: How) -> None:
        self._left = (self.target_state or self.state, self.session.now_ns(), len(self.words()), how.value)

    def words(self) -> tuple[str, ...]:
        return tuple("".join(self._texts).split())

    def record(self) -> StreamRecord:
        words = self.words()
        end = End.LEFT if self._left else self._end or End.CUT
        state, left_ns, words_at_leaving, how = self._left or (None, None, len(words), None)
        ended_ns = self.session.now_ns()
        return StreamRecord(
            ask=self.ask,
            end=end,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            status=self._status,
            head_ns=self._head_ns,
            frame_ns=tuple(self._frame_ns),
            words=words,
            finish_reason=self._finish_reason,
            error=self.error,
            left_in=state,
            left_ns=left_ns,
            due_ns=self._due_ns,
            left_by=how,
            gone_ns=(self.gone_ns or ended_ns) if self._left else None,
            words_after_leaving=len(words) - words_at_leaving,
        )


def _object(data: bytes, *, or_list: bool = False) -> dict[str, Any]:
    """A JSON object; with `or_list` a list of them becomes `{"list": …}`."""
    try:
        payload = json.loads(data)
    except ValueError:
        raise MalformedResponse(f"not JSON: {_shorten(data)!r}") from None
    if or_list and isinstance(payload, list):
        payload = {"list": payload}
    if not isinstance(payload, dict):
        raise MalformedResponse(f"not a JSON object: {_shorten(data)!r}")
    return payload
