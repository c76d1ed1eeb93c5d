"""The bootstrap server of a prefill: where its ranks are, and which data-parallel rank has a room (SGLang reference §2.1)."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from windtunnel.serve import asgi
from windtunnel.serve.asgi import Endpoint, Receive, Scope, Send, send_bytes
from windtunnel.serve.clock import now_ns
from windtunnel.wire.sglang.bootstrap import (
    DpRankQueryBody,
    DpRankRegistration,
    Place,
    RouteRegistration,
    topology_answer,
)

BODY_LIMIT_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 10.0
ROOMS_LIMIT = 1_000_000
_ALL = -1
_TEXT = b"text/plain; charset=utf-8"

Answer = tuple[int, str | Mapping[str, Any]]
"""Status, and a text or a JSON object."""
Model = TypeVar("Model", bound=BaseModel)


class Bootstrap:
    """What one bootstrap server knows. Owned by its prefill's event loop."""

    def __init__(self, entry_ttl_ns: int, clock: Callable[[], int] = now_ns) -> None:
        """`entry_ttl_ns`: how long a room → rank entry stays (`SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL`)."""
        self._ttl_ns = entry_ttl_ns
        self._clock = clock
        self._ranks: dict[Place, RouteRegistration] = {}
        self._rooms: dict[int, tuple[int, int]] = {}
        """Room → (DP rank, when it was registered), oldest first."""

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    def register(self, told: RouteRegistration) -> Answer:
        """A rank that comes again replaces itself; one that contradicts another is refused."""
        for place, other in self._ranks.items():
            if place != told.place and other.layout != told.layout:
                return 400, f"This rank's layout {told.layout} contradicts the layout {other.layout} of rank {place}"
        self._ranks[told.place] = told
        return 200, "OK"

    def route(self, place: Place) -> Answer:
        """The topology (all -1) or one rank; nothing until all ranks are there."""
        one = next(iter(self._ranks.values()), None)
        expected = one.ranks if one is not None else 1
        if one is None or len(self._ranks) < expected:
            return 503, f"Prefill server not fully registered yet ({len(self._ranks)} of {expected} ranks)"
        if place == Place(_ALL, _ALL, _ALL, _ALL):
            return 200, topology_answer(one)
        found = self._ranks.get(place)
        if found is None:
            return 404, f"Bootstrap info not found for {place}"
        return 200, {"rank_ip": found.rank_ip, "rank_port": found.rank_port}

    def register_dp_rank(self, told: DpRankRegistration) -> Answer:
        self._forget_old()
        self._rooms.pop(told.bootstrap_room, None)
        self._rooms[told.bootstrap_room] = (told.dp_rank, self._clock())
        return 200, "OK"

    def query_dp_ranks(self, asked: DpRankQueryBody) -> Answer:
        self._forget_old()
        known = {str(room): self._rooms[room][0] for room in asked.bootstrap_rooms if room in self._rooms}
        return 200, known

    def _forget_old(self) -> None:
        before_ns = self._clock() - self._ttl_ns
        while self._rooms:
            room, (_rank, since_ns) = next(iter(self._rooms.items()))
            if since_ns > before_ns and len(self._rooms) < ROOMS_LIMIT:
                return
            del self._rooms[room]


def build(bootstrap: Bootstrap) -> Endpoint:
    """The ASGI application."""
    routes: Mapping[str, Mapping[str, Endpoint]] = {
        "/route": {"PUT": _reading(RouteRegistration, bootstrap.register), "GET": _route(bootstrap)},
        "/register_dp_rank": {"POST": _reading(DpRankRegistration, bootstrap.register_dp_rank)},
        "/query_dp_ranks": {"POST": _reading(DpRankQueryBody, bootstrap.query_dp_ranks)},
        "/health": {"GET": _health},
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods = routes.get(scope["path"])
        endpoint = None if methods is None else methods.get(scope["method"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await _send(send, (404, "404: Not Found") if methods is None else (405, "405: Method Not Allowed"))

    return app


def _reading(model: type[Model], handle: Callable[[Model], Answer]) -> Endpoint:
    async def endpoint(_scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await asgi.read_body(receive, BODY_LIMIT_BYTES, BODY_TIMEOUT_S)
            answer = handle(model.model_validate_json(body))
        except ValidationError as error:
            answer = 400, _complaint(error)
        except asgi.BodyTooLarge:
            answer = 413, f"The body is over {BODY_LIMIT_BYTES} bytes"
        except asgi.BodyTimeout:
            answer = 408, "The body did not arrive in time"
        except asgi.ClientGone:
            return
        await _send(send, answer)

    return endpoint


def _complaint(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors())


_PLACE = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


def _route(bootstrap: Bootstrap) -> Endpoint:
    async def endpoint(scope: Scope, _receive: Receive, send: Send) -> None:
        asked = dict(part.partition("=")[::2] for part in scope["query_string"].decode("latin-1").split("&"))
        try:
            place = Place(*(int(asked[name]) for name in _PLACE))
        except (KeyError, ValueError):
            await _send(send, (400, f"Missing or malformed inputs: write {', '.join(_PLACE)} as numbers"))
            return
        await _send(send, bootstrap.route(place))

    return endpoint


async def _health(_scope: Scope, _receive: Receive, send: Send) -> None:
    await _send(send, (200, "OK"))


async def _send(send: Send, answer: Answer) -> None:
    status, content = answer
    if isinstance(content, str):
        await send_bytes(send, status, content.encode(), _TEXT)
    else:
        await send_bytes(send, status, json.dumps(content).encode())
