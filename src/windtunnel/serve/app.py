"""The ASGI application: the route table and what stands around it."""

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route, Router

from windtunnel.serve import operations
from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_error
from windtunnel.serve.generate import GenerateRoute
from windtunnel.serve.middleware import ApiKeys, HttpMetrics, PodHeaders, RequestIds
from windtunnel.serve.responses import ResponsesRoute
from windtunnel.serve.state import Server
from windtunnel.wire.family import Family
from windtunnel.wire.http import method_not_allowed, not_found
from windtunnel.wire.vllm import families, responses

HANDLER = "windtunnel.handler"


class ExactRoute(Route):
    """Answers exactly its methods (FastAPI adds no HEAD to GET) and tells the metrics which route it was."""

    def __init__(self, path: str, endpoint: Endpoint, methods: Sequence[str] | None) -> None:
        super().__init__(path, _Raw(endpoint), methods=methods)
        self.app = endpoint
        if methods is not None:
            self.methods = set(methods)

    def matches(self, scope: Any) -> Any:
        match, child_scope = super().matches(scope)
        if match is Match.FULL:
            child_scope[HANDLER] = self.path
        return match, child_scope

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        if self.methods and scope["method"] not in self.methods:
            await send_error(send, method_not_allowed(), [(b"allow", ", ".join(sorted(self.methods)).encode())])
        else:
            await self.app(scope, receive, send)


class _Raw:
    """Keeps Starlette from wrapping an endpoint in a request object."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def build(server: Server) -> Any:
    """The application of a vLLM server."""
    config = server.config
    generating: Sequence[Family] = families(config.runner, config.convert)
    routes = [
        ExactRoute(path, _generating(server, server.seams.family(family)), ["POST"])
        for family in generating
        for path in family.paths
    ]
    routes += [ExactRoute(path, endpoint, methods) for path, methods, endpoint in operations.table(server)]
    app: Any = HttpMetrics(Router(routes, default=_not_found), metrics=server.metrics)
    app = CORSMiddleware(app, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    if config.api_keys:
        app = ApiKeys(app, keys=config.api_keys)
    if config.pod_name or config.pod_namespace:
        app = PodHeaders(app, config.pod_name, config.pod_namespace, config.port)
    if config.enable_request_id_headers:
        app = RequestIds(app)
    return server.seams.wrap_app(app)


def _generating(server: Server, family: Family) -> GenerateRoute:
    return (ResponsesRoute if family.name == responses.name else GenerateRoute)(server, family)


async def _not_found(_scope: Scope, _receive: Receive, send: Send) -> None:
    """FastAPI's own shape."""
    await send_error(send, not_found())
