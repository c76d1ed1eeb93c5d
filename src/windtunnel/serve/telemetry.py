"""What `serve` tells the metrics of a flavour. `wire.vllm.metrics.VllmMetrics` is one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from windtunnel.core.outputs import FinishReason, StepOutput
from windtunnel.core.request import EngineRequest


class Metrics(Protocol):
    """Called on the event loop's thread, in the order in which things happen."""

    def on_submitted(self, rank: int, requests: Sequence[EngineRequest]) -> None: ...

    def on_rejected(self, reason: str) -> None: ...

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        """Before the step's outputs are handed to anybody."""
        ...

    def on_finished(self, request_id: str, reason: FinishReason, now_ns: int) -> None:
        """The front end has handled a final output."""
        ...

    def on_dropped(self, request_ids: Iterable[str]) -> None:
        """The client has gone, or the request was aborted by id: nothing more of it is counted."""
        ...

    def request_metrics_ms(self, request_id: str) -> Mapping[str, float | None] | None:
        """The timings of a live request, for its own answer."""
        ...

    def on_http(
        self, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None: ...
