"""The way of one request to the target, whatever is spoken there, and what the requests to one target share."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from windtunnel.lab.connection import GRPC, HTTP2, Connection, How, MalformedResponse, fetch
from windtunnel.lab.dialects import DIALECTS
from windtunnel.lab.leave import Leave
from windtunnel.lab.plan import Api
from windtunnel.lab.record import Ask, End
from windtunnel.lab.target import Target

if TYPE_CHECKING:
    from windtunnel.lab.grpc_client import GrpcCall, GrpcPool
    from windtunnel.lab.http2 import Http2Pool, Http2Stream
    from windtunnel.lab.recorder import Recorder

FRAME_LIMIT_BYTES = 4 * 1024 * 1024


def request_body(target: Target, ask: Ask) -> bytes:
    """The JSON of a request, as it is sent."""
    return json.dumps({**DIALECTS[ask.api].body(target.model, ask), "stream": ask.stream}).encode()


def described(target: Target, ask: Ask) -> str:
    """A request in one line, as it would be sent; of a gRPC worker's kind and tokens nothing is known beforehand."""
    if target.origin.scheme in GRPC:
        return f"Generate {ask.request_id} stream={ask.stream} n={ask.n} max_tokens={ask.max_tokens} {ask.prompt!r}"
    return f"POST {target.path(ask.api)} {request_body(target, ask).decode()}"


def request_headers(target: Target, ask: Ask) -> Mapping[str, str]:
    """The target's headers and the request's id, unless the person who runs the storm has given one."""
    own = {"x-request-id": ask.request_id} if ask.request_id else {}
    return {**own, **target.headers}


class Link(Protocol):
    """The way of one request to the target, whatever is spoken there."""

    async def send(self, ask: Ask, *, whole: bool = True) -> None: ...

    async def read(self, recorder: "Recorder") -> None:
        """The answer to its end. Raises ConnectionCut, MalformedResponse or OSError."""
        ...

    async def abort(self, recorder: "Recorder") -> None:
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

    async def read(self, recorder: "Recorder") -> None:
        await _read(self._exchange, recorder)

    async def abort(self, recorder: "Recorder") -> None:
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

    async def read(self, recorder: "Recorder") -> None:
        await self._call.read(recorder)

    async def abort(self, recorder: "Recorder") -> None:
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


_ABORT_ROUTES: Mapping[str, tuple[tuple[str, Callable[[str], dict[str, Any]]], ...]] = {
    "sglang": (("/abort_request", lambda request_id: {"rid": request_id}),),
    "vllm": (
        ("/abort_requests", lambda request_id: {"request_ids": [request_id]}),
        ("/inference/v1/abort_requests", lambda request_id: {"request_ids": [request_id]}),
    ),
}
"""Engine kind → routes that abort by id, tried in turn (vLLM reference §1.3 and §1.4, SGLang reference §5)."""


async def _abort_by_id(recorder: "Recorder") -> None:
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


async def _read(connection: "Connection | Http2Stream", recorder: "Recorder") -> None:
    head = await connection.head()
    recorder.head(head.status)
    if recorder.ask.stream and (head.status == 200 or "event-stream" in head.headers.get("content-type", "")):
        await _read_stream(connection.parts(head), recorder)
    elif head.status == 200:
        recorder.whole_answer(await connection.body(head))
    else:
        recorder.refused(await connection.body(head))
    if head.status != 200:
        recorder.ended(End.ERROR_STATUS, error=recorder.error or f"with a stream of {len(recorder.words())} words")


async def _read_stream(parts: AsyncIterator[bytes], recorder: "Recorder") -> None:
    buffer = b""
    async for part in parts:
        *frames, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(buffer) > FRAME_LIMIT_BYTES:
            raise MalformedResponse(f"an SSE frame over {FRAME_LIMIT_BYTES} bytes")
        for frame in frames:
            recorder.frame(frame)
    recorder.stream_over(rest=buffer)
