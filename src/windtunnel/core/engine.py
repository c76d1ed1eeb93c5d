"""The seam between an engine and its drivers (real time, virtual time, chosen interleavings)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from windtunnel.core.lifecycle import State
from windtunnel.core.outputs import Refusal, StepOutput
from windtunnel.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as `/debug/requests` shows it. Times in nanoseconds on the driver's clock."""

    request_id: str
    state: State
    since_ns: int
    arrival_ns: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    resources: Mapping[str, Any]
    """What it holds: block ids, slots, rooms, handles."""
    tags: Mapping[str, str]


class Engine(Protocol):
    """A simulated engine. Not thread-safe: one driver owns it and passes the time in; `now_ns` never goes back."""

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """Admit all of `requests` or none. Raises ValueError for a request id that is already live."""
        ...

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        """End these sequences; unknown and finished ids are no-ops. Returns how many were live.

        With `notify` the next `advance` reports each with `FinishReason.ABORT` (an operator's pause); without it nothing is
        reported (a client has gone). Resources are free, and the gauges say so, after at most one more step.
        """
        ...

    def release(self, request_ids: Sequence[str], now_ns: int) -> None:
        """These, submitted with `UNTIL_RELEASED`, may run. Unknown ids and those that do not wait for it are no-ops."""
        ...

    def delay_step(self, by_ns: int) -> None:
        """The step under way, if any, ends so much later: something else has taken the processor."""
        ...

    def next_event_at(self) -> int | None:
        """When `advance` next has something to do; None while idle."""
        ...

    def advance(self, now_ns: int) -> list[StepOutput]:
        """Run everything that is due at or before `now_ns`, in order."""
        ...

    def live(self) -> list[SequenceView]:
        """All sequences that have not ended, in the order of their queues."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless every resource has exactly one owner and nothing has leaked."""
        ...
