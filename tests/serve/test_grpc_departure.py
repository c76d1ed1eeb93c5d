"""A gRPC client that leaves is gone, whatever the phase and the way; `Abort` ends a stream from the server's side."""

import asyncio
import contextlib
import logging

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tests.serve.grpc_live import GrpcServer, answer, arrived, completes, grpc_live, request, streamed_ids
from tests.serve.live import FOREVER_NS, PATIENCE_S

PHASES = {
    "queued": {"scheduler__max_num_seqs": 1, "pacing__ttft_ns": FOREVER_NS},
    "prefill": {"pacing__ttft_ns": FOREVER_NS},
    "decode": {"pacing__itl_ns": FOREVER_NS},
}
DEADLINE_S = 0.25


async def occupy(server: GrpcServer) -> None:
    """Fill the only slot, so that the next request queues."""
    call = server.stub.Generate(request(request_id="first"))
    server.live.server.holder = call  # type: ignore[attr-defined]  # kept alive with the server
    await server.live.until(lambda: server.live.states() == ["prefill"])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("mechanism", ["cancel", "deadline", "channel"])
@pytest.mark.parametrize("phase", PHASES)
async def test_resources_are_free_within_one_step(
    phase: str, mechanism: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc_live(**PHASES[phase]) as server:
        live = server.live
        if phase == "queued":
            await occupy(server)
        quiet = live.states()
        channel = grpc.aio.insecure_channel(server.address)
        call = await arrived(
            live,
            lambda timeout: rpc.VllmEngineStub(channel).Generate(request(stream=stream), timeout=timeout),
            DEADLINE_S if mechanism == "deadline" else None,
            lambda: live.states() == [*quiet, phase] and live.published() == len(quiet) + 1,
        )
        steps = live.server.driver.steps
        with caplog.at_level(logging.INFO, "windtunnel.serve"):
            if mechanism == "cancel":
                call.cancel()
            elif mechanism == "channel":
                await channel.close()
            await live.until(lambda: live.states() == quiet)
            await live.until(lambda: live.server.driver.steps > steps)
        assert live.server.driver.steps == steps + 1
        assert live.published() == len(quiet)
        assert live.gauge("vllm:request_success_total") == 0
        assert [record.message for record in caplog.records if "has gone" in record.message] != []
        await live.until(lambda: len(live.server.jobs) == len(quiet))
        live.server.engine.check_integrity()
        await channel.close()


async def test_a_killed_connection_frees_the_request() -> None:
    """The client's process dies: its sockets close, no RPC is cancelled."""
    async with grpc_live(**PHASES["decode"]) as server:
        relay = await Relay.start(server.front.port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
            call = rpc.VllmEngineStub(channel).Generate(request())
            await server.live.until(lambda: server.live.states() == ["decode"])
            relay.cut()
            await server.live.until(lambda: server.live.states() == [])
            await server.live.until(lambda: len(server.live.server.jobs) == 0)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await relay.stop()


class Relay:
    """A TCP relay whose connections can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, target: int) -> "Relay":
        relay = cls(target)
        relay._server = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        relay.port = relay._server.sockets[0].getsockname()[1]
        return relay

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, sink)))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("phase", PHASES)
async def test_abort_ends_the_stream_with_a_complete(phase: str) -> None:
    async with grpc_live(**PHASES[phase]) as server:
        if phase == "queued":
            await occupy(server)
        quiet = server.live.states()
        call = server.stub.Generate(request(request_id="victim"), timeout=PATIENCE_S)
        await server.live.until(lambda: server.live.states() == [*quiet, phase])
        await server.live.until(lambda: server.live.published() == len(quiet) + 1)
        await server.stub.Abort(pb.AbortRequest(request_ids=["victim", "nobody"]))
        messages = [message async for message in call]
        assert await call.code() is grpc.StatusCode.OK
        assert [end.finish_reason for end in completes(messages)] == ["abort"]
        assert len(streamed_ids(messages)) == (phase == "decode")
        assert server.live.states() == quiet
        await server.live.until(lambda: len(server.live.server.jobs) == len(quiet))


async def test_abort_of_a_whole_answer_gives_what_there_is() -> None:
    async with grpc_live(**PHASES["decode"]) as server:
        call = server.stub.Generate(request(request_id="victim", stream=False, n=2, temperature=1.0), timeout=PATIENCE_S)
        await server.live.until(lambda: server.live.states() == ["decode"] * 2)
        await server.live.until(lambda: server.live.published() == 2)
        await server.stub.Abort(pb.AbortRequest(request_ids=["victim"]))
        ends = completes([message async for message in call])
    assert [(end.index, end.finish_reason, len(end.output_ids)) for end in ends] == [(0, "abort", 1), (1, "abort", 1)]


async def test_abort_follows_the_callers_ids() -> None:
    """Unknown ids and no ids hit nothing; two calls with one id are both hit; an id is no pattern."""
    async with grpc_live(**PHASES["decode"]) as server:
        twins = [server.stub.Generate(request(request_id="a"), timeout=PATIENCE_S) for _ in range(2)]
        other = server.stub.Generate(request(request_id="a-1"), timeout=PATIENCE_S)
        await server.live.until(lambda: server.live.states() == ["decode"] * 3)
        await server.stub.Abort(pb.AbortRequest(request_ids=[]))
        await server.stub.Abort(pb.AbortRequest(request_ids=["b", "", "*"]))
        assert server.live.states() == ["decode"] * 3
        await server.stub.Abort(pb.AbortRequest(request_ids=["a", "a"]))
        for call in twins:
            assert completes([message async for message in call])[0].finish_reason == "abort"
        assert server.live.states() == ["decode"]
        other.cancel()
        await server.live.until(lambda: server.live.states() == [])


async def test_a_reader_that_never_reads_is_cut_and_frees_the_engine() -> None:
    """Flow control stops the stream; the deltas that wait merge, and after the write deadline the request is aborted."""
    options = {"limits__write_deadline_ns": 200_000_000, "scheduler__max_model_len": 30_000}
    async with grpc_live(**options) as server:
        channel = grpc.aio.insecure_channel(server.address)
        call = rpc.VllmEngineStub(channel).Generate(request(max_tokens=29_000, logprobs=20))
        await call.read()
        await server.live.until(lambda: len(server.live.server.jobs) == 0)
        assert server.live.states() == []
        assert completes(await answer(server, request(max_tokens=2)))
        call.cancel()
        await channel.close()
