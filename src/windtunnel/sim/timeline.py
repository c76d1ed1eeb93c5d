"""A time line in the Trace Event Format, which Perfetto and chrome://tracing read.

A process for each engine, a lane for each request.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from windtunnel.core.lifecycle import Transition


class Timeline:
    """A fold over transitions. Keeps the first `limit` requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left_out = 0
        self._lanes: dict[str, list[Transition]] = {}
        self._engine: dict[str, int] = {}

    def fold(self, engine: int, transitions: Sequence[Transition]) -> None:
        for transition in transitions:
            lane = self._lanes.get(transition.request_id)
            if lane is None:
                if len(self._lanes) >= self.limit:
                    self.left_out += transition.after.terminal
                    continue
                lane = self._lanes[transition.request_id] = []
                self._engine[transition.request_id] = engine
            lane.append(transition)

    def events(self) -> list[dict[str, Any]]:
        """Complete ("X") events, one for each state a request was in; microseconds, as the format wants."""
        names = [
            {"ph": "M", "name": "process_name", "pid": engine, "args": {"name": f"engine {engine}"}}
            for engine in sorted(set(self._engine.values()))
        ]
        return names + [event for lane, request in enumerate(self._lanes) for event in self._lane(lane, request)]

    def _lane(self, lane: int, request_id: str) -> list[dict[str, Any]]:
        rows = self._lanes[request_id]
        place = {"pid": self._engine[request_id], "tid": lane}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", **place, "args": {"name": request_id}}]
        for row, following in pairwise(rows):
            span = {"ts": row.at_ns / 1000, "dur": (following.at_ns - row.at_ns) / 1000}
            detail = dict(row.detail or {})
            events.append({"ph": "X", "name": row.after.value, "cat": "request", **place, **span, "args": detail})
        last = rows[-1]
        events.append(
            {"ph": "i", "name": last.after.value, "s": "t", **place, "ts": last.at_ns / 1000, "args": dict(last.detail or {})}
        )
        return events

    def text(self) -> str:
        document = {"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": {"requests_left_out": self.left_out}}
        return json.dumps(document, separators=(",", ":"))
