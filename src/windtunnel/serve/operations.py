"""The routes that generate nothing: models, health, metrics, tokenizers, operator and debug routes. One table."""

from collections.abc import Callable, Sequence

from windtunnel.core.words import WORDS
from windtunnel.serve.asgi import ClientGone, Endpoint, Receive, Scope, Send, headers_of, send_bytes
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import UsageError
from windtunnel.serve.responses import CancelRoute, RetrieveRoute
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import dumps, error_body, parse_json, read_json
from windtunnel.wire.metrics import CONTENT_TYPE, render
from windtunnel.wire.vllm import messages
from windtunnel.wire.vllm.models import models_body, version_body
from windtunnel.wire.vllm.tokenize import detokenize, tokenize

Handler = Callable[[Server, bytes, Scope], "tuple[int, bytes]"]
Row = tuple[str, Sequence[str] | None, Endpoint]

_RECENT = 100


class Simple:
    """An endpoint that answers from the server's state. `handle` gets the body and returns (status, JSON)."""

    def __init__(self, server: Server, handle: Handler, *, reads_body: bool) -> None:
        self._server = server
        self._handle = handle
        self._reads_body = reads_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._server.body(receive) if self._reads_body else b""
            status, answer = self._handle(self._server, body, scope)
        except ClientGone:
            return
        except WireError as error:
            status, answer = error.status, error_body(error)
        await send_bytes(send, status, answer, b"application/json" if answer else None)


class MetricsPage:
    """GET /metrics, for any method (§1.1)."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, render(self._server.metrics.store), CONTENT_TYPE.encode())


def table(server: Server) -> list[Row]:
    """All rows (path, methods, endpoint) of a vLLM server with this configuration."""
    rows = [*_ALWAYS, *(_DEVELOPER if server.config.dev_mode else ())]
    endpoints: list[Row] = [
        (path, methods, Simple(server, handle, reads_body="POST" in methods)) for path, methods, handle in rows
    ]
    endpoints.append(("/metrics", None, MetricsPage(server)))
    endpoints.append(("/v1/responses/{response_id}", ["GET"], RetrieveRoute(server)))
    endpoints.append(("/v1/responses/{response_id}/cancel", ["POST"], CancelRoute(server)))
    return endpoints


def _empty(_server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    return 200, b""


def _load(server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    """Stays 0 without `--enable-server-load-tracking` (§1.1)."""
    return 200, dumps({"server_load": server.load if server.config.enable_server_load_tracking else 0})


def _version(server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    return 200, version_body(server.env)


def _models(server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    return 200, models_body(server.env)


def _tokenize(server: Server, body: bytes, scope: Scope) -> tuple[int, bytes]:
    return 200, tokenize(body, headers_of(scope), server.env)


def _detokenize(server: Server, body: bytes, scope: Scope) -> tuple[int, bytes]:
    return 200, detokenize(body, headers_of(scope), server.env)


def _count_tokens(server: Server, body: bytes, scope: Scope) -> tuple[int, bytes]:
    return messages.count_tokens(body, headers_of(scope), server.env)


def _get_config(server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    return 200, dumps(server.effective_config())


def _post_config(server: Server, body: bytes, scope: Scope) -> tuple[int, bytes]:
    """Change live settings: all that are named, or none. Durations as text with a unit."""
    changes = read_json(body, headers_of(scope))
    if not isinstance(changes, dict):
        raise WireError('The body must be an object of settings, such as {"itl": "20ms"}.')
    try:
        server.reconfigure(changes)
    except UsageError as error:
        raise WireError(str(error), param=str(error).partition(":")[0]) from None
    return _get_config(server, body, scope)


def _debug_requests(server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    """Every live request with its state, age and resources, and what ended lately."""
    at_ns = now_ns()
    live = [
        {
            "request_id": view.request_id,
            "state": view.state.value,
            "in_state_ms": (at_ns - view.since_ns) / 1e6,
            "age_ms": (at_ns - view.arrival_ns) / 1e6,
            "prompt_tokens": view.prompt_tokens,
            "computed_tokens": view.computed_tokens,
            "output_tokens": view.output_tokens,
            "resources": dict(view.resources),
            **view.tags,
        }
        for view in server.engine.live()
    ]
    return 200, dumps({"live": live, "recent": server.history.recent(_RECENT), "jobs": len(server.jobs), "steps": server.driver.steps})


def _debug_oracle(_server: Server, _body: bytes, _scope: Scope) -> tuple[int, bytes]:
    return 200, dumps({"words": WORDS})


def _abort_requests(server: Server, body: bytes, _scope: Scope) -> tuple[int, bytes]:
    """Developer route (§1.4): an empty list aborts everything; with ids the answer counts what was asked for."""
    wanted = parse_json(body).get("request_ids", []) if body else []
    if not isinstance(wanted, list):
        raise WireError("request_ids must be a list of engine request ids.", param="request_ids")
    if not wanted:
        return 200, dumps({"status": "aborted", "aborted": server.jobs.abort_all()})
    server.jobs.abort_by_id(str(request_id) for request_id in wanted)
    return 200, dumps({"status": "aborted", "aborted": len(wanted)})


_ALWAYS: tuple[tuple[str, Sequence[str], Handler], ...] = (
    ("/health", ["GET"], _empty),
    ("/ping", ["GET", "POST"], _empty),
    ("/load", ["GET"], _load),
    ("/version", ["GET"], _version),
    ("/v1/models", ["GET"], _models),
    ("/tokenize", ["POST"], _tokenize),
    ("/detokenize", ["POST"], _detokenize),
    ("/v1/messages/count_tokens", ["POST"], _count_tokens),
    ("/admin/config", ["GET"], _get_config),
    ("/admin/config", ["POST"], _post_config),
    ("/debug/requests", ["GET"], _debug_requests),
    ("/debug/oracle", ["GET"], _debug_oracle),
)
_DEVELOPER: tuple[tuple[str, Sequence[str], Handler], ...] = (("/abort_requests", ["POST"], _abort_requests),)
