"""When a request is in a state that only its target knows.

Where the target has `/debug/requests` (a simulated server does) the state of this very request is read there, found by the
`X-Request-Id` that the storm sends or, where a router gives it another one, by its prompt's marker. A prefill of vLLM has
finished its request between the legs: what it holds for a decode is read in `/debug/disaggregation`. Elsewhere it is
inferred from the gauges: somebody is in that state, and this request has not seen a word yet. Records say which (`queued`,
or `queued (inferred)`).
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.core import oracle
from windtunnel.core.units import MS
from windtunnel.lab.asks import ID_PREFIX
from windtunnel.lab.connection import ConnectionCut, MalformedResponse, Origin, fetch
from windtunnel.lab.plan import Moment
from windtunnel.lab.record import Ask, Sample
from windtunnel.lab.sampler import Sampler
from windtunnel.lab.session import Session

POLL_NS = 4 * MS
DEBUG_PATH = "/debug/requests"
HOLDS_PATH = "/debug/disaggregation"
_HELD = "held"

_SEEN: Mapping[Moment, frozenset[str]] = {
    Moment.QUEUED: frozenset({"queued", "deferred"}),
    Moment.PREFILL: frozenset({"prefill"}),
    Moment.DECODE: frozenset({"decode"}),
    Moment.TRANSFER: frozenset({"transferring"}),
    Moment.BETWEEN: frozenset({"inflight", "prealloc", _HELD}),
}
"""Moment → states of the lifecycle table, and of a request that is over."""

_TRANSFERS = ("num_prefill_inflight_queue_reqs", "num_decode_transfer_queue_reqs")


def _up(sample: Sample, base: Sample, *keys: str) -> bool:
    return any(sample.gauges.get(key, 0) > base.gauges.get(key, 0) for key in keys)


_INFERRED: Mapping[Moment, Callable[[Sample, Sample], bool]] = {
    Moment.QUEUED: lambda now, base: _up(now, base, "waiting"),
    Moment.PREFILL: lambda now, base: _up(now, base, "running") and not _up(now, base, "waiting"),
    Moment.DECODE: lambda now, base: _up(now, base, "running"),
    Moment.TRANSFER: lambda now, base: _up(now, base, *_TRANSFERS),
    Moment.BETWEEN: lambda now, base: _up(now, base, "num_decode_prealloc_queue_reqs"),
}


@dataclass(frozen=True, eq=False)
class _Wait:
    """`key` is a part of the request's id, `identity` that of its prompt as `/debug/requests` spells it."""

    moment: Moment
    key: str
    identity: str
    event: asyncio.Event


class States:
    """Waits for states of the target. Owns the poll of `/debug/requests`, which runs while somebody waits."""

    def __init__(self, session: Session, sampler: Sampler, patience_ns: int) -> None:
        """A state that has not come after the patience is not waited for."""
        self._session = session
        self._sampler = sampler
        self._patience_ns = patience_ns
        self._origins: tuple[Origin, ...] = ()
        self._waiting: list[_Wait] = []
        self._poll: asyncio.Task[None] | None = None
        self.baseline: Sample | None = None
        self.missed = 0
        """How many waits ended by patience."""

    async def look(self) -> None:
        """Find out which sources have `/debug/requests`."""
        origins = {url.origin for url in self._session.target.metrics} | {self._session.target.plain}
        self._origins = tuple([origin for origin in origins if await _live(origin) is not None])

    @property
    def seen(self) -> bool:
        """Whether states are read, not inferred."""
        return bool(self._origins)

    async def wait(self, ask: Ask, moment: Moment) -> str:
        """Returns the state's name when the request is in it, or after the patience with `… (not seen)`."""
        event = asyncio.Event()
        tag = f"{ask.tag:x}"
        wait = _Wait(moment, ask.request_id or tag, f"{oracle.identity_of_tag(tag):016x}", event)
        if self.seen:
            self._waiting.append(wait)
            self._ensure_poll()
        else:
            self._sampler.listen(lambda sample: self._infer(sample, moment, event))
        try:
            async with asyncio.timeout(self._patience_ns / 1e9):
                await event.wait()
        except TimeoutError:
            self.missed += 1
            return f"{moment.value} (not seen)"
        finally:
            if wait in self._waiting:
                self._waiting.remove(wait)
        return moment.value if self.seen else f"{moment.value} (inferred)"

    def _infer(self, sample: Sample, moment: Moment, event: asyncio.Event) -> None:
        if self.baseline is not None and sample.usable and _INFERRED[moment](sample, self.baseline):
            event.set()

    def _ensure_poll(self) -> None:
        if self._poll is None or self._poll.done():
            self._poll = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiting:
            for origin in self._origins:
                for request in await _live(origin) or ():
                    shown = str(request.get("external_id") or request.get("request_id"))
                    self._notice(shown, str(request.get("state")), request.get("identity"))
                if any(wait.moment is Moment.BETWEEN for wait in self._waiting):
                    for request_id in await _held(origin):
                        self._notice(request_id, _HELD)
            await asyncio.sleep(POLL_NS / 1e9)

    def _notice(self, request_id: str, state: str, identity: str | None = None) -> None:
        """An earlier attempt has the same prompt, so the identity counts only where the id is not one of the storm's."""
        renamed = identity is not None and ID_PREFIX not in request_id
        for wait in self._waiting:
            if state in _SEEN[wait.moment] and (wait.identity == identity if renamed else wait.key in request_id):
                wait.event.set()

    async def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)


async def _live(origin: Origin) -> list[dict[str, Any]] | None:
    """The live requests that `/debug/requests` shows; None where there is no such page."""
    told = await _page(origin, DEBUG_PATH)
    live = told.get("live") if isinstance(told, dict) else None
    return live if isinstance(live, list) else None


async def _held(origin: Origin) -> list[str]:
    """Ids of finished requests whose blocks are kept for a decode (vLLM)."""
    told = await _page(origin, HOLDS_PATH)
    parts = [part.get("holds") for part in told if isinstance(part, dict)] if isinstance(told, list) else []
    return [str(hold.get("request_id")) for holds in parts for hold in holds or () if isinstance(hold, dict)]


async def _page(origin: Origin, path: str) -> Any:
    """Its JSON; None where there is no such page."""
    root = origin.root
    try:
        async with asyncio.timeout(2):
            answer = await fetch(root, "GET", path, {})
        return json.loads(answer.body) if answer.status == 200 else None
    except (OSError, ConnectionCut, MalformedResponse, TimeoutError, ValueError):
        return None
