"""The ASGI application: the route table and what stands around it."""

from collections.abc import Sequence
from typing import Any

from starlette.routing import Match, Route, Router

from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_error
from windtunnel.serve.middleware import PodHeaders, RequestIds
from windtunnel.serve.state import Server
from windtunnel.wire.http import method_not_allowed, not_found

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
    """The application of a server of either flavour."""
    config, flavour = server.config, server.flavour
    routes = [
        ExactRoute(path, flavour.route(server, server.seams.family(family)), ["POST"])
        for family in flavour.families(config)
        for path in family.paths
    ]
    routes += [ExactRoute(path, endpoint, methods) for path, methods, endpoint in flavour.rows(server)]
    app = flavour.middleware(server, Router(routes, default=_not_found))
    if config.pod_name or config.pod_namespace:
        app = PodHeaders(app, config.pod_name, config.pod_namespace, config.port)
    if config.enable_request_id_headers:
        app = RequestIds(app)
    return server.seams.wrap_app(app)


async def _not_found(_scope: Scope, _receive: Receive, send: Send) -> None:
    """FastAPI's own shape."""
    await send_error(send, not_found())
