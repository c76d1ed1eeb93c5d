"""The ASGI application: the route table and what stands around it."""

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from windtunnel.serve import operations
from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_bytes
from windtunnel.serve.generate import GenerateRoute
from windtunnel.serve.middleware import ApiKeys, HttpMetrics, RequestIds
from windtunnel.serve.responses import ResponsesRoute
from windtunnel.serve.state import Server
from windtunnel.wire.family import Family, WireError
from windtunnel.wire.http import DETAIL, error_body
from windtunnel.wire.vllm import families, responses

HANDLER = "windtunnel.handler"


class ExactRoute(Route):
    """Answers exactly its methods (FastAPI adds no HEAD to GET) and tells the metrics which route it was."""

    def __init__(self, path: str, endpoint: Endpoint, methods: Sequence[str] | None) -> None:
        super().__init__(path, _Raw(endpoint), methods=methods)
        if methods is not None:
            self.methods = set(methods)

    def matches(self, scope: Any) -> Any:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope[HANDLER] = self.path
        return match, child_scope


class _Raw:
    """Keeps Starlette from wrapping an endpoint in a request object."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def build(server: Server) -> Any:
    """The application of a vLLM server."""
    config = server.config
    generating: Sequence[Family] = families()
    routes = [ExactRoute(path, _generating(server, family), ["POST"]) for family in generating for path in family.paths]
    routes += [ExactRoute(path, endpoint, methods) for path, methods, endpoint in operations.table(server)]
    middleware = [
        Middleware(HttpMetrics, metrics=server.metrics),
        Middleware(RequestIds, enabled=config.enable_request_id_headers),
        Middleware(CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]),
        Middleware(ApiKeys, keys=config.api_keys),
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error, Exception: _crash})
    return server.seams.wrap_app(app)


def _generating(server: Server, family: Family) -> GenerateRoute:
    return ResponsesRoute(server) if family is responses else GenerateRoute(server, family)


class _Answer:
    """A ready answer, as Starlette's exception handlers return it."""

    def __init__(self, error: WireError, headers: dict[str, str] | None = None) -> None:
        self._error = error
        self._headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_bytes(send, self._error.status, error_body(self._error), headers=self._headers)


async def _http_error(_request: Any, error: Any) -> Any:
    """404 and 405 in FastAPI's own shape."""
    return _Answer(WireError(error.detail, error.status_code, DETAIL), error.headers)


async def _crash(_request: Any, _error: Exception) -> Any:
    """A defect of ours: the real server's generic 500; Starlette logs the trace."""
    return _Answer(WireError("Internal server error", 500, "InternalServerError"))
