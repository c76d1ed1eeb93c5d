"""Generation requests to a gRPC worker: vLLM's `VllmEngine` or SGLang's `SglangScheduler` (vLLM reference §8, SGLang §8.1).

Which of the two it is, its model and its tokenizer are asked once. Messages carry token ids, so the texts that the lab judges
are made with the worker's own tokenizer (`GetTokenizer`); without it every token id is a word.

Clients that stay, and those that leave by cancelling a call or by its deadline, share one channel. FIN closes a channel of its
own in order; RST resets the TCP connection under it, through a relay that only this client uses.
"""

import asyncio
import io
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as sglang_rpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_rpc
from tokenizers import Tokenizer

from windtunnel.lab.connection import Connection, ConnectionCut, How, Origin
from windtunnel.lab.grpc_door import LOOK_TIMEOUT_S, GrpcDoor, find_door
from windtunnel.lab.record import Ask, End
from windtunnel.wire.decode_stream import TokenTexts

CONNECT_TIMEOUT_S = 5.0
TOKENIZER_LIMIT_BYTES = 256 * 1024 * 1024
_UNLIMITED = [("grpc.max_receive_message_length", -1)]
_ALONE = [*_UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
"""A channel that shares no TCP connection with others to the same address."""
_RELAY_BYTES = 64 * 1024

STATUSES: Mapping[grpc.StatusCode, int] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: 400,
        grpc.StatusCode.UNAUTHENTICATED: 401,
        grpc.StatusCode.PERMISSION_DENIED: 403,
        grpc.StatusCode.NOT_FOUND: 404,
        grpc.StatusCode.DEADLINE_EXCEEDED: 408,
        grpc.StatusCode.ABORTED: 409,
        grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
        grpc.StatusCode.UNIMPLEMENTED: 501,
        grpc.StatusCode.UNAVAILABLE: 503,
    }
)
"""What a call's status would be over HTTP; 500 for others."""
_CUTS = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "RST_STREAM", "Stream removed", "keepalive")
"""In the details of a status that this side's library made because the connection or the stream ended."""


class Recorder(Protocol):
    """What a call tells of what it sees (`lab.recorder`)."""

    ask: Ask
    error: str | None

    def head(self, status: int) -> None: ...

    def choice(self, choice: dict[str, Any]) -> None: ...

    def stream_over(self, rest: bytes) -> None: ...

    def terminated(self) -> None: ...

    def ended(self, end: End, *, error: str) -> None: ...

    def due(self) -> None: ...

    def left(self, how: How) -> None: ...


@dataclass(frozen=True, slots=True)
class Worker:
    """What one worker has told of itself."""

    engine: str
    model: str
    context: int
    tokenizer: Tokenizer | None


class Unusable(Exception):
    """Nothing answers there, or no service that is known."""


class GrpcPool:
    """Owns the shared channel to one worker and what is known of it."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._entered: asyncio.Future[tuple[GrpcDoor, Worker]] | None = None
        self._channel: grpc.aio.Channel | None = None

    async def open(self, how: How | None, deadline_s: float | None) -> "GrpcCall":
        """A call that leaves by `how`. Raises OSError when nothing answers there."""
        self._entered = self._entered or asyncio.ensure_future(self._enter())
        try:
            door, worker = await asyncio.shield(self._entered)
        except Unusable as error:
            raise OSError(str(error)) from error
        if how is How.RST:
            relay = await Relay.start(self._origin)
            channel = door.channel(_ALONE, f"127.0.0.1:{relay.port}")
            return GrpcCall(worker, channel, deadline_s, own=True, relay=relay)
        if how is How.FIN:
            return GrpcCall(worker, door.channel(_ALONE), deadline_s, own=True)
        assert self._channel is not None
        return GrpcCall(worker, self._channel, deadline_s)

    async def _enter(self) -> tuple[GrpcDoor, Worker]:
        door = await _door(self._origin)
        self._channel = door.channel(_UNLIMITED)
        return door, await _worker(self._channel, self._origin)

    async def close(self) -> None:
        if self._entered is not None:
            self._entered.cancel()
            await asyncio.gather(self._entered, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


async def _door(origin: Origin) -> GrpcDoor:
    try:
        return await find_door(origin)
    except OSError as error:
        raise Unusable(str(error) or f"no TLS handshake within {LOOK_TIMEOUT_S:g} s") from error


async def look(origin: Origin) -> Worker:
    """Ask a worker, but not for its tokenizer. Raises Unusable."""
    async with (await _door(origin)).channel(_UNLIMITED) as channel:
        return await _worker(channel, origin, with_tokenizer=False)


async def _worker(channel: grpc.aio.Channel, origin: Origin, *, with_tokenizer: bool = True) -> Worker:
    vllm = vllm_rpc.VllmEngineStub(channel)
    sglang = sglang_rpc.SglangSchedulerStub(channel)
    asked = (("vllm", vllm, vllm_pb.GetModelInfoRequest()), ("sglang", sglang, sglang_pb.GetModelInfoRequest()))
    told = "no answer"
    for engine, stub, request in asked:
        try:
            info = await stub.GetModelInfo(request, timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            cut = any(mark in (error.details() or "") for mark in _CUTS)
            told = f"{error.code().name}: {error.details()}{origin.unwelcome(error) if cut else ''}"
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                continue
            break
        model = info.served_model_name or info.model_path
        return Worker(engine, model, info.max_context_length, await _tokenizer(stub) if with_tokenizer else None)
    raise Unusable(f"neither VllmEngine nor SglangScheduler answers: {told}")


async def _tokenizer(stub: Any) -> Tokenizer | None:
    """The worker's own; None where it has none to give."""
    data = bytearray()
    try:
        async for piece in stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10 * CONNECT_TIMEOUT_S):
            data += piece.data
            if len(data) > TOKENIZER_LIMIT_BYTES:
                return None
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
            return Tokenizer.from_buffer(archive.read("tokenizer.json"))
    except (grpc.aio.AioRpcError, zipfile.BadZipFile, LookupError):
        return None


class Relay:
    """A TCP connection to the worker that this process can reset. For one client."""

    def __init__(self, target: Origin) -> None:
        self._target = target
        self._links: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, target: Origin) -> "Relay":
        relay = cls(target)
        relay._server = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        relay.port = relay._server.sockets[0].getsockname()[1]
        return relay

    _server: asyncio.Server
    port: int

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = Connection(reader, writer)
        try:
            far = await Connection.open(Origin("http", self._target.host, self._target.port))
        except OSError:
            near.leave(How.FIN)
            return
        self._links += [near, far]
        for source, sink in ((near, far), (far, near)):
            task = asyncio.ensure_future(_copy(source, sink))
            self._tasks.add(task)

    def cut(self) -> None:
        """RST, on both sides."""
        self._server.close()
        for link in self._links:
            link.leave(How.RST)

    async def stop(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(source: Connection, sink: Connection) -> None:
    with suppress(ConnectionCut):
        while data := await source.some():
            await sink.send(data)
    sink.leave(How.FIN)


class GrpcCall:
    """One `Generate`. `own`: the channel is this call's alone and ends with it."""

    def __init__(
        self,
        worker: Worker,
        channel: grpc.aio.Channel,
        deadline_s: float | None,
        *,
        own: bool = False,
        relay: Relay | None = None,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._deadline_s = deadline_s
        self._own = own
        self._relay = relay
        self._call: Any = None
        self._closing: asyncio.Future[None] | None = None

    def begin(self, ask: Ask, headers: Mapping[str, str]) -> None:
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._call = self._stub().Generate(generate_request(self._worker, ask), timeout=self._deadline_s, metadata=metadata)

    def _stub(self) -> Any:
        if self._worker.engine == "sglang":
            return sglang_rpc.SglangSchedulerStub(self._channel)
        return vllm_rpc.VllmEngineStub(self._channel)

    async def read(self, recorder: Recorder) -> None:
        """Everything to the end of the call, which is told to the recorder."""
        texts, begun = Texts(self._worker.tokenizer), False
        try:
            async for message in self._call:
                if not begun:
                    begun = True
                    recorder.head(200)
                _take(message, recorder, texts)
        except grpc.aio.AioRpcError as error:
            self._failed(error, recorder)
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ConnectionCut("this client cancelled the call") from None
        recorder.terminated()
        recorder.stream_over(b"")

    def _failed(self, error: grpc.aio.AioRpcError, recorder: Recorder) -> None:
        details = error.details() or ""
        if self._deadline_s is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            recorder.due()
            recorder.left(How.DEADLINE)
            return
        if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
            raise OSError(details)
        if any(mark in details for mark in _CUTS):
            raise ConnectionCut(f"{error.code().name}: {details}")
        recorder.head(STATUSES.get(error.code(), 500))
        recorder.ended(End.ERROR_STATUS, error=f"{error.code().name}: {details}")

    async def abort(self, request_id: str) -> None:
        """`Abort`, by the id that the request was made with."""
        if self._worker.engine == "sglang":
            await self._stub().Abort(sglang_pb.AbortRequest(request_id=request_id), timeout=CONNECT_TIMEOUT_S)
        else:
            await self._stub().Abort(vllm_pb.AbortRequest(request_ids=[request_id]), timeout=CONNECT_TIMEOUT_S)

    def leave(self, how: How) -> None:
        """RST resets the connection under the channel, FIN closes the channel; all else cancels a call that has not ended."""
        if self._relay is not None and how is How.RST:
            self._relay.cut()
        elif self._own and how is How.FIN and self._closing is None:
            self._closing = asyncio.ensure_future(self._channel.close())
        elif self._call is not None:
            self._call.cancel()

    async def closed(self) -> None:
        if self._own:
            await (self._closing or self._channel.close())
        if self._relay is not None:
            await self._relay.stop()


def generate_request(worker: Worker, ask: Ask) -> Any:
    """The message of one request; a chat's prompt goes as it is, without a template."""
    temperature = 1.0 if ask.n > 1 else 0.0
    common_part = {"temperature": temperature, "n": ask.n, "ignore_eos": True, "skip_special_tokens": True}
    if worker.engine == "vllm":
        params = vllm_pb.SamplingParams(max_tokens=ask.max_tokens, **common_part)
        return vllm_pb.GenerateRequest(request_id=ask.request_id, text=ask.prompt, stream=ask.stream, sampling_params=params)
    if worker.tokenizer is None:
        raise OSError("the worker takes token ids only, and GetTokenizer gives no tokenizer.json to make them with")
    ids = worker.tokenizer.encode(ask.prompt).ids
    return sglang_pb.GenerateRequest(
        request_id=ask.request_id,
        tokenized=sglang_pb.TokenizedInput(original_text=ask.prompt, input_ids=ids),
        sampling_params=sglang_pb.SamplingParams(max_new_tokens=ask.max_tokens, **common_part),
        stream=ask.stream,
    )


class Texts:
    """Tokens of one choice to text, as they come."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    def text(self, token_ids: Any) -> str:
        if self._texts is None:
            return "".join(f" {token}" for token in token_ids)
        return "".join([self._texts.text(token) for token in token_ids])


def _take(message: Any, recorder: Recorder, texts: Texts) -> None:
    streamed = message.WhichOneof("response") == "chunk"
    part = message.chunk if streamed else message.complete
    token_ids = part.token_ids if streamed else () if recorder.ask.stream else part.output_ids
    text = texts.text(token_ids) if part.index == 0 else ""
    recorder.choice({"index": part.index, "text": text, "finish_reason": None if streamed else part.finish_reason})
