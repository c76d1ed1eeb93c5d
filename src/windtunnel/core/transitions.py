"""The log of what happened to sequences: the only place where a state changes."""

from collections.abc import Mapping
from typing import Protocol

from windtunnel.core.lifecycle import Event, State, Transition, next_state


class Lived(Protocol):
    """What the log needs of a sequence."""

    request_id: str
    state: State
    since_ns: int


class TransitionLog:
    """Owned by one engine. Times never go back, whatever the caller's clock says."""

    def __init__(self) -> None:
        self._pending: list[Transition] = []
        self._last_ns = 0

    def __len__(self) -> int:
        return len(self._pending)

    def record(self, sequence: Lived, event: Event, now_ns: int, detail: Mapping[str, int | str] | None = None) -> None:
        """Change the state by the table and remember it. Raises IllegalTransition."""
        before, after = sequence.state, next_state(sequence.state, event)
        self._last_ns = now_ns = max(now_ns, self._last_ns)
        sequence.state, sequence.since_ns = after, now_ns
        self._pending.append(Transition(now_ns, sequence.request_id, event, before, after, detail))

    def take(self) -> list[Transition]:
        taken, self._pending = self._pending, []
        return taken
