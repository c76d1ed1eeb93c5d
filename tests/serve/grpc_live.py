"""A live server with its gRPC listener, and the real grpcio client, in the test's own event loop."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as sglang_rpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tests.serve.live import PATIENCE_S, LiveServer, live

from windtunnel.serve import grpc_front
from windtunnel.serve.grpc_front import GrpcFront


@dataclass(frozen=True)
class GrpcServer:
    live: LiveServer
    front: GrpcFront
    channel: grpc.aio.Channel
    stub: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.front.port or self.live.port}"


@contextlib.asynccontextmanager
async def grpc_live(**values: Any) -> AsyncIterator[GrpcServer]:
    """`values` as in `tests.serve.live.live`."""
    async with live(**{"grpc_port": None if values.get("grpc_on_http_port") else 0, **values}) as server:
        front = await grpc_front.start(server.server)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port or server.port}") as channel:
                make = sglang_rpc.SglangSchedulerStub if server.server.config.engine == "sglang" else rpc.VllmEngineStub
                yield GrpcServer(server, front, channel, make(channel))
        finally:
            await front.stop(0)


def request(text: str = "storm [wt:7]", *, stream: bool = True, request_id: str = "", **params: Any) -> pb.GenerateRequest:
    """Endless unless `max_tokens` says otherwise."""
    told = {"ignore_eos": True, "max_tokens": 1000, **params}
    sampling = pb.SamplingParams(**{name: value for name, value in told.items() if value is not None})
    return pb.GenerateRequest(request_id=request_id, text=text, stream=stream, sampling_params=sampling)


async def answer(server: GrpcServer, told: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
    """All messages of one call. Raises AioRpcError."""
    return [message async for message in server.stub.Generate(told, timeout=PATIENCE_S, **options)]


async def arrived(
    server: LiveServer, start: Callable[[float | None], Any], deadline_s: float | None, there: Callable[[], bool]
) -> Any:
    """The call that `start` begins, once it is there. One whose deadline has come before begins again with a longer one."""
    jobs = len(server.server.jobs)
    while True:
        call = start(deadline_s)
        await server.until(lambda: there() or call.done())  # noqa: B023  # awaited here
        if there():
            return call
        assert deadline_s is not None, "it has ended by itself"
        deadline_s *= 4
        await server.until(lambda: len(server.server.jobs) == jobs)


def chunks(messages: Sequence[pb.GenerateResponse]) -> list[pb.GenerateStreamChunk]:
    return [message.chunk for message in messages if message.HasField("chunk")]


def completes(messages: Sequence[pb.GenerateResponse]) -> list[pb.GenerateComplete]:
    return [message.complete for message in messages if message.HasField("complete")]


def streamed_ids(messages: Sequence[pb.GenerateResponse], index: int = 0) -> list[int]:
    """The tokens of one choice of a stream."""
    return [token for chunk in chunks(messages) if chunk.index == index for token in chunk.token_ids]
