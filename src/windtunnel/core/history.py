"""A fold over the event log: what each request has been through. Feeds `/debug/requests` and traces."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from windtunnel.core.lifecycle import Transition


class RequestHistory:
    """The last `limit` ended requests and the transitions of those still live. One owner: the server's state."""

    def __init__(self, limit: int) -> None:
        self._live: dict[str, list[Transition]] = {}
        self._ended: deque[list[Transition]] = deque(maxlen=limit)

    def record(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            rows = self._live.setdefault(transition.request_id, [])
            rows.append(transition)
            if transition.after.terminal:
                self._ended.append(self._live.pop(transition.request_id))

    def of(self, request_id: str) -> Sequence[Transition]:
        return self._live.get(request_id, ())

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The newest ended requests first, as plain values. Times in nanoseconds on the engine's clock."""
        newest = list(self._ended)[: -count - 1 : -1]
        return [
            {"request_id": rows[0].request_id, "state": rows[-1].after.value, "log": [row(item) for item in rows]}
            for rows in newest
        ]


def row(transition: Transition) -> dict[str, Any]:
    return {
        "at_ns": transition.at_ns,
        "event": transition.event.value,
        "state": transition.after.value,
        **({"detail": dict(transition.detail)} if transition.detail else {}),
    }
