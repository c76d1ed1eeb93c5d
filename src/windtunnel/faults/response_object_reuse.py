"""Fault `response-object-reuse`: the historic cancelled-streams defect, with its race forced instead of waited for.

A server keeps its request/response objects in a pool. A handler that starts a stream returns at once, and its object goes
back to the pool, but the streaming task still holds it. When a write fails, because the client has gone, the task
"reports" that on the object: it restores the path it was started with and sets an error status. By then the object may
serve somebody else:

* the report lands before the other request has been routed: it is routed by the stale path and gets a 404;
* it lands after its handler has run: the body is right and the status is 500, be it a metrics page or a whole stream.

The report waits until the object has been handed out again, so each cancelled stream harms at most one later request, and
the reports on one object land a few uses apart, as orphaned tasks wake one after another. The phase in which they land
alternates, so that both historic symptoms show in any storm of two streams or more.
"""

from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from windtunnel.serve.seams import AsgiApp, Seams, WriteFailed, log_disconnect

_KEY = "windtunnel.pooled"
_POOL_LIMIT = 1024
_REPORTS_LIMIT = 4096
_USES_BETWEEN_REPORTS = 7
_STALE_STATUS = 500

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PooledContext:
    """A request/response object that is used again and again. Whoever holds it last wins: that is the defect."""

    def __init__(self) -> None:
        self.path = ""
        self.status: int | None = None
        self.reports: deque[tuple[str, str]] = deque(maxlen=_REPORTS_LIMIT)
        """Failed writes still to be reported on this object: (phase, stale path)."""
        self._uses_until_report = 0

    def begin(self, path: str) -> None:
        self.path, self.status = path, None
        self._uses_until_report = max(self._uses_until_report - 1, 0)

    def land(self, phase: str) -> None:
        """The report of an earlier stream's failed write, if one is due in this phase."""
        if self.reports and self.reports[0][0] == phase and not self._uses_until_report:
            _phase, self.path = self.reports.popleft()
            self.status = _STALE_STATUS if phase == "answered" else None
            self._uses_until_report = _USES_BETWEEN_REPORTS


class ContextPool:
    """Last in, first out, as object pools are."""

    def __init__(self) -> None:
        self._free: list[PooledContext] = []

    def take(self) -> PooledContext:
        return self._free.pop() if self._free else PooledContext()

    def give_back(self, context: PooledContext) -> None:
        if len(self._free) < _POOL_LIMIT:
            self._free.append(context)


class PooledSend:
    """The handler's `send`, writing through the pooled object."""

    def __init__(self, context: PooledContext, pool: ContextPool, send: Send) -> None:
        self._context = context
        self._pool = pool
        self._send = send
        self.released = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] != "http.response.start":
            await self._send(message)
            return
        self._context.land("answered")
        status = self._context.status or message["status"]
        if _is_stream(message):
            self.release()
        await self._send({**message, "status": status})

    def release(self) -> None:
        """Back to the pool, once: for a stream when it starts, otherwise when the handler returns."""
        if not self.released:
            self.released = True
            self._pool.give_back(self._context)


def _is_stream(message: MutableMapping[str, Any]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"])


class ResponseObjectReuse:
    """One pool for the whole server."""

    NAME = "response-object-reuse"

    def __init__(self) -> None:
        self._pool = ContextPool()
        self._cancelled = 0

    def attach(self, seams: Seams) -> Seams:
        return seams.with_(wrap_app=self._wrap, write_failed=self._reporter)

    def _wrap(self, app: AsgiApp) -> AsgiApp:
        async def pooled(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            context = self._pool.take()
            context.begin(scope["path"])
            context.land("routed")
            scope["path"] = context.path
            scope[_KEY] = context
            pooled_send = PooledSend(context, self._pool, send)
            try:
                await app(scope, receive, pooled_send)
            finally:
                pooled_send.release()

        return pooled

    def _reporter(self, scope: Any) -> WriteFailed:
        context: PooledContext = scope[_KEY]
        stale_path = "/stale" + scope["path"]

        def report(answer_id: str, phase: str) -> None:
            log_disconnect(answer_id, phase)
            self._cancelled += 1
            context.reports.append(("routed" if self._cancelled % 2 else "answered", stale_path))

        return report


FAULT = ResponseObjectReuse()
