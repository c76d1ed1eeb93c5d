"""What every kind of routing needs: legs to workers, and a client whose leaving is seen."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeVar

import httpx

from windtunnel.serve.asgi import ClientGone, Receive, Scope, Send, headers_of, send_bytes

log = logging.getLogger("windtunnel.router")

CONNECT_S = 5.0
NO_OBJECT = "the body must be a JSON object"
Headers = Sequence[tuple[str, str]]
Result = TypeVar("Result")
_PASSED_ON = ("authorization", "content-type", "traceparent", "x-request-id", "accept")
_HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "server", "date", "transfer-encoding"})
_NOT_SENT = _HOP_BY_HOP | {"host", "upgrade", "te", "trailer", "proxy-connection", "expect"}
_GONE = "http.disconnect"


class Proxy:
    """Owns the connections to the workers, and the work that belongs to no request."""

    def __init__(self, request_timeout_s: float, connections: int) -> None:
        self.client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=2 * connections, max_keepalive_connections=0),
        )
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Goes on when the request that began it has ended; `close` cancels it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()

    @asynccontextmanager
    async def leg(self, url: str, scope: Scope, raw: bytes, headers: Headers | None = None) -> AsyncIterator[httpx.Response]:
        """An answer whose head has come. Leaving the block closes the connection. Raises httpx.HTTPError."""
        query = scope.get("query_string", b"").decode("latin-1")
        target = url + scope["path"] + (f"?{query}" if query else "")
        told = passed_on(scope) if headers is None else headers
        request = self.client.build_request(scope["method"], target, content=raw, headers=list(told))
        answer = await self.client.send(request, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def whole(self, url: str, scope: Scope, raw: bytes, headers: Headers | None = None) -> httpx.Response:
        """An answer that has been read. Raises httpx.HTTPError."""
        async with self.leg(url, scope, raw, headers) as answer:
            await answer.aread()
            return answer


class Client:
    """The client of one request whose body has been read: nothing but its leaving can come from it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> Self:
        self._watch = asyncio.ensure_future(_gone(self._receive))
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`. A client that leaves cancels it: ClientGone."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                await _end(task)
        if task.cancelled():
            raise ClientGone
        return task.result()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != _GONE:
        """Nothing else can come after the body."""


async def until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; a client that leaves cancels it (ClientGone)."""
    async with Client(receive) as client:
        await client.during(work)


async def both(entering: Sequence[Awaitable[Result]]) -> list[Result]:
    """All results; when one fails the others are given up."""
    tasks = [asyncio.ensure_future(one) for one in entering]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def pass_on(parts: AsyncIterator[bytes], send: Send) -> None:
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start(send: Send, answer: httpx.Response) -> None:
    """The worker's status and headers."""
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer_headers(answer)})


def passed_on(scope: Scope) -> list[tuple[str, str]]:
    """The headers that SGLang's routers pass on (clients §3)."""
    headers = headers_of(scope)
    return [(name, headers[name]) for name in _PASSED_ON if name in headers]


def all_headers(scope: Scope, but: Collection[str]) -> list[tuple[str, str]]:
    """Every header of the client's that belongs to the request and not to the connection, but those."""
    told = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    return [(name, value) for name, value in told if name not in _NOT_SENT and name not in but]


def answer_headers(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in answer.headers.raw if name.decode("latin-1").lower() not in _HOP_BY_HOP]


def object_of(raw: bytes) -> dict[str, Any] | None:
    """A body's JSON object; None for anything else."""
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


async def complain(send: Send, status: int, message: str) -> None:
    body = {"error": {"message": message, "type": "router_error", "param": None, "code": status}}
    await send_bytes(send, status, json.dumps(body).encode())
