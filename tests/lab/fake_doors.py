"""Further doors of the fake server, with the same defects behind: gRPC, and HTTP/2 by a small reverse proxy on hypercorn."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
from hypercorn.asyncio import serve
from hypercorn.config import Config
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tests.lab.fake_server import FakeServer
from tokenizers import Tokenizer

from windtunnel.core import oracle
from windtunnel.serve.tokenizer_bundle import pieces, zipped
from windtunnel.wire.builtin_files import tokenizer_files


class GrpcDoor(rpc.VllmEngineServicer):
    """`VllmEngine` of a fake server."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.peers: set[str] = set()
        """The TCP connections that calls came by."""
        self._files = tokenizer_files()
        self._tokenizer = Tokenizer.from_buffer(self._files["tokenizer.json"])

    async def GetModelInfo(self, _request: Any, _context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(served_model_name="fake", max_context_length=4096)

    async def GetTokenizer(self, _request: Any, context: Any) -> None:  # noqa: N802
        for piece in pieces(zipped(self._files)):
            await context.write(piece)

    async def Abort(self, request: Any, _context: Any) -> pb.AbortResponse:  # noqa: N802
        self.fake.aborted |= set(request.request_ids)
        return pb.AbortResponse()

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        fake = self.fake
        self.peers.add(context.peer())
        if fake.has("wedge"):
            await asyncio.sleep(3600)
        if fake.has("hidden-error"):
            await context.abort(grpc.StatusCode.INTERNAL, "engine says no")
        identity = oracle.identity_of_marker(request.text)
        assert identity is not None
        fake.identities.append(identity)
        fake.seen_ids.append(request.request_id)
        fake.running += 1
        fake.stale = 0
        gone = asyncio.Event()
        working = asyncio.ensure_future(
            self._work(request, context, fake.words(identity, request.sampling_params.max_tokens), gone)
        )
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            gone.set()
            task = asyncio.ensure_future(fake.departed(working))
            fake.tasks.add(task)
            task.add_done_callback(fake.tasks.discard)
            raise
        fake.running -= 1
        fake.finished += 1

    async def _work(self, request: Any, context: Any, words: list[str], gone: asyncio.Event) -> None:
        fake, ids, reason = self.fake, [], "length"
        for at, word in enumerate(words):
            await asyncio.sleep(fake.itl_s)
            fake.generated += 1
            if request.request_id in fake.aborted or (at == 2 and fake.has("abort-others")):
                reason = "abort"
                fake.finished -= 1  # what was aborted is not counted when the stream ends
                break
            new = self._tokenizer.encode(f" {word}", add_special_tokens=False).ids
            ids += new
            if request.stream and not gone.is_set():
                await context.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=new)))
        if not (gone.is_set() or fake.has("no-done")):
            await context.write(pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, finish_reason=reason)))


@contextlib.asynccontextmanager
async def grpc_door(fake: FakeServer, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[int, GrpcDoor]]:
    """The port."""
    server, door = grpc.aio.server(), GrpcDoor(fake)
    rpc.add_VllmEngineServicer_to_server(door, server)
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield port, door
    finally:
        await server.stop(0)


class Proxy:
    """A reverse proxy as an ASGI application. A deaf one does not notice that its client has left."""

    def __init__(self, upstream: str, *, deaf: bool) -> None:
        self.clients: set[Any] = set()
        """The TCP connections that requests came by."""
        self.versions: set[str] = set()
        self._deaf = deaf
        self._http = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_keepalive_connections=0))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            self.clients.add(tuple(scope["client"]))
            self.versions.add(scope["http_version"])
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body, more = body + event.get("body", b""), event.get("more_body", False)
        passing = asyncio.ensure_future(self._pass(scope, body, send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({passing} if self._deaf else {passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if passing.done():
            passing.result()
        passing.cancel()
        await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _pass(self, scope: Any, body: bytes, send: Any) -> None:
        headers = {
            name.decode(): value.decode() for name, value in scope["headers"] if name in (b"content-type", b"x-request-id")
        }
        async with self._http.stream(scope["method"], scope["path"], content=body, headers=headers) as answer:
            kept = [(b"content-type", answer.headers.get("content-type", "text/plain").encode())]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def http2_door(upstream: str, *, deaf: bool = False) -> AsyncIterator[tuple[int, Proxy]]:
    """(port, proxy) of an HTTP/2 server without TLS in front of `upstream`."""
    proxy, stop = Proxy(upstream, deaf=deaf), asyncio.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.errorlog = config.accesslog = None
    config.graceful_timeout = 0.1
    serving = asyncio.ensure_future(serve(proxy, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    try:
        yield port, proxy
    finally:
        stop.set()
        await serving
        await proxy._http.aclose()
