"""The process with both listeners: real signals, a real port that is taken."""

import asyncio
import re
import socket
import sys

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tests.serve.grpc_live import completes, request
from tests.serve.live import PATIENCE_S

_PORT = re.compile(rb"gRPC listens on port (\d+)")


async def start(*flags: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "windtunnel", "serve", "m", "--port", "0", *flags]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


async def grpc_port(process: asyncio.subprocess.Process, told: re.Pattern[bytes] = _PORT) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := await process.stderr.readline():
            if found := told.search(line):
                return int(found[1])
    raise AssertionError("the process ended without a gRPC port")


async def test_a_term_lets_streams_end_within_their_grace() -> None:
    process = await start("--grpc-port", "0", "--itl", "20ms")
    port = await grpc_port(process)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        messages = []
        async for message in rpc.VllmEngineStub(channel).Generate(request(max_tokens=10), wait_for_ready=True):
            if not messages:
                process.terminate()
            messages.append(message)
    assert completes(messages)[0].finish_reason == "length"
    async with asyncio.timeout(PATIENCE_S):
        _, rest = await process.communicate()
    assert process.returncode == 0, rest.decode()


async def test_a_taken_port_is_a_usage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("--grpc-port", str(port))
        async with asyncio.timeout(PATIENCE_S):
            _, told = await process.communicate()
    assert process.returncode == 2
    assert f"--grpc-port {port}" in told.decode() and "Traceback" not in told.decode()
