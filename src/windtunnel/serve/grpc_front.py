"""The gRPC listener: one service from a table of methods, beside it health, reflection and a graceful stop.

Imported only with `--grpc-port`, so that no other server pays for grpc at its start. A method is
`async (server, request, call) -> message`, or, for a stream, one that writes its messages to the call and returns None. It
raises WireError for what it refuses.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from windtunnel.serve.config import UsageError
from windtunnel.wire.family import WireError
from windtunnel.wire.grpc_status import code_name

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

log = logging.getLogger("windtunnel.serve")

Call = grpc.aio.ServicerContext
Method = Callable[["Server", Any, Any], Awaitable[Any]]

GRACE_S = 5.0
"""How long calls at work have to end after the stop (vLLM reference §8)."""
_KEEPALIVE_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_INTERNAL = WireError("Internal server error", 500, "InternalServerError")


class GrpcFront:
    """Owns the listener. Lives on the event loop's thread, beside the HTTP server and over the same engine."""

    def __init__(self, server: "Server", service: Any, methods: Mapping[str, Method]) -> None:
        """`service`: the descriptor. Methods of it that the table does not have answer UNIMPLEMENTED."""
        self._health = HealthService(server, service.full_name)
        self._grpc = grpc.aio.server(options=_options(server), maximum_concurrent_rpcs=server.config.limits.connections)
        handlers = {name: _handler(server, service.methods_by_name[name], method) for name, method in methods.items()}
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (service.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self.port = _bind(server, self._grpc)

    async def start(self) -> None:
        await self._grpc.start()
        log.info("gRPC listens on %s", f"port {self.port}" if self.port else "the port of HTTP")

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Not serving from here on; calls at work have `grace_s`, then they are cancelled."""
        self._health.stopping = True
        await self._grpc.stop(grace_s)


def _options(server: "Server") -> list[tuple[str, int]]:
    """Answers have no limit of their own: the model's context bounds them."""
    return [
        ("grpc.max_receive_message_length", server.config.limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", server.config.limits.head_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.so_reuseport", 0),
    ]


def _bind(server: "Server", listener: Any) -> int:
    """The port, a free one for 0; 0 for the port of HTTP. Raises UsageError where it cannot be had."""
    config = server.config
    if server.grpc_relay is not None:
        return _bind_behind(listener, server.grpc_relay.path)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.grpc_port or 0}"
    try:
        if config.ssl_certfile and config.ssl_keyfile:
            return int(listener.add_secure_port(address, _credentials(config.ssl_certfile, config.ssl_keyfile)))
        return int(listener.add_insecure_port(address))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--grpc-port {config.grpc_port}: cannot listen on {address}: {error}") from None


def _bind_behind(listener: Any, path: Path) -> int:
    """To the Unix socket of the port that HTTP shares; a path may be too long for one."""
    try:
        listener.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise UsageError(f"--grpc-on-http-port: cannot listen on {path} (a shorter TMPDIR may help): {error}") from None
    return 0


def _credentials(certificate: str, key: str) -> Any:
    with open(key, "rb") as key_file, open(certificate, "rb") as certificate_file:
        return grpc.ssl_server_credentials([(key_file.read(), certificate_file.read())])


def _handler(server: "Server", method: Any, run: Method) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    request = message_factory.GetMessageClass(method.input_type)
    answer = message_factory.GetMessageClass(method.output_type)
    return make(_guarded(server, run), request.FromString, _serializer(answer))


def _serializer(answer: Any) -> Callable[[Any], bytes]:
    """Of a method's answers; a method may have serialised some itself."""
    serialize: Callable[[Any], bytes] = answer.SerializeToString

    def to_bytes(message: Any) -> bytes:
        return message if type(message) is bytes else serialize(message)

    return to_bytes


def _guarded(server: "Server", run: Method) -> Callable[[Any, Any], Awaitable[Any]]:
    """Errors become statuses; a cancelled call stays cancelled."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await run(server, request, context)
        except WireError as error:
            found = error
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("a gRPC call broke")
            found = _INTERNAL
        return await context.abort(grpc.StatusCode[code_name(found)], found.message)

    return call


class HealthService:
    """`grpc.health.v1.Health` for "" and the one service, as smg-grpc-servicer 0.14.1 has it: `Watch` tells once and ends."""

    def __init__(self, server: "Server", service: str) -> None:
        self._server = server
        self._known = ("", service)
        self.stopping = False

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # the generated code looks for this name
        if request.service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def List(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status()) for name in self._known}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802
        answer = health_pb2.HealthCheckResponse
        yield answer(status=self._status() if request.service in self._known else answer.SERVICE_UNKNOWN)

    def _status(self) -> Any:
        serving = self._server.ready and not self._server.dead and not self.stopping
        return health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING


async def start(server: "Server") -> GrpcFront:
    """The listener of `server`'s engine. Raises UsageError where the port cannot be had."""
    assert server.loop is asyncio.get_running_loop()
    module = _module(server.config.engine)
    front = GrpcFront(server, module.SERVICE, module.methods(server))
    await front.start()
    return front


def _module(engine: str) -> Any:
    """The service of an engine: `SERVICE` and `methods`."""
    if engine == "sglang":
        from windtunnel.serve.sglang import grpc as sglang

        return sglang
    from windtunnel.serve import grpc_vllm

    return grpc_vllm
