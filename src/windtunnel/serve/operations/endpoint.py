"""What all these routes share: read a bounded body, call a handler, write a small answer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from windtunnel.serve.asgi import JSON, ClientGone, Endpoint, Receive, Scope, Send, headers_of, send_bytes
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import dumps, error_body

Row = tuple[str, Sequence[str] | None, Endpoint]

_QUERY_FIELDS = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One request to an operator route, read."""

    body: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]
    """Of a repeated name the last value counts."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A small answer. Without a content type the header is left out, as vLLM does."""

    body: bytes = b""
    status: int = 200
    content_type: bytes | None = None


Handler = Callable[[Server, Call], Reply | Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table of operator routes."""

    path: str
    methods: tuple[str, ...]
    handle: Handler
    tokenises: bool = False
    """Its work grows with the body and touches nothing mutable: a large body is handled on the planner's thread."""


def get(path: str, handle: Handler) -> Rule:
    return Rule(path, ("GET",), handle)


def post(path: str, handle: Handler) -> Rule:
    return Rule(path, ("POST",), handle)


def post_text(path: str, handle: Handler) -> Rule:
    """A route that tokenises what it is sent."""
    return Rule(path, ("POST",), handle, tokenises=True)


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(dumps(value), status, JSON)


def empty(_server: Server, _call: Call) -> Reply:
    return Reply()


class Simple:
    """An endpoint that answers from the server's state."""

    error_body: Callable[[WireError], bytes] = staticmethod(error_body)

    def __init__(self, server: Server, rule: Rule) -> None:
        self._server = server
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._server.body(scope, receive) if "POST" in self._rule.methods else b""
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), True, max_num_fields=_QUERY_FIELDS))
            work = partial(self._rule.handle, self._server, Call(body, headers_of(scope), query))
            reply = await self._server.planner.run(len(body), work) if self._rule.tokenises else work()
            if not isinstance(reply, Reply):
                reply = await reply
        except ClientGone:
            return
        except WireError as error:
            reply = Reply(self.error_body(error), error.status, JSON)
        except ValueError as error:
            reply = Reply(self.error_body(WireError(f"query: {error}", kind="Bad Request")), 400, JSON)
        await send_bytes(send, reply.status, reply.body, reply.content_type, unread=self._server.unread(receive))
