"""`/openapi.json`, `/docs` and `/redoc`, unless `--disable-fastapi-docs` (§1.1)."""

from collections.abc import Sequence
from functools import lru_cache

from windtunnel.serve.asgi import JSON
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, get
from windtunnel.serve.state import Server
from windtunnel.wire.vllm import openapi

_HTML = b"text/html; charset=utf-8"


def rules(paths: Sequence[str]) -> tuple[Rule, ...]:
    """The routes of a server that has these other paths. The document is made when it is first asked for."""

    @lru_cache(maxsize=1)
    def document(scale_out: bool) -> bytes:
        return openapi.document(paths, scale_out=scale_out)

    def show(server: Server, _call: Call) -> Reply:
        return Reply(document(server.config.enable_scale_out), 200, JSON)

    return (get("/openapi.json", show), get("/docs", _page), get("/redoc", _page))


def _page(_server: Server, _call: Call) -> Reply:
    return Reply(openapi.PAGE.encode(), 200, _HTML)
