"""What a storm shows of itself while it blows."""

from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.core.units import MS
from windtunnel.lab.finding import Finding
from windtunnel.lab.findings import find
from windtunnel.lab.record import LostClient, StormResult

VIEW_EVERY_NS = 200 * MS
LOOK_LIMIT = 4_000
"""With more records than this, findings wait for the end of the storm."""
_AT_ONCE = frozenset(
    {"bystander_error", "crossed_stream", "corrupt_stream", "unterminated_stream", "hidden_error", "collateral_abort"}
)
"""Findings that stand on one answer. The others compare with what comes later, and are shown once the gauges have settled."""


@dataclass(frozen=True, slots=True)
class StormEvent:
    """A phase begins."""

    at_ns: int
    phase: str
    text: str


@dataclass(frozen=True, slots=True)
class StormView:
    """How a storm stands at one instant."""

    at_ns: int
    phase: str
    planned: int
    opened: int
    open_by_stage: Mapping[str, int]
    """Requests that are open, by stage: `incomplete`, `sent`, `head`, `tokens`."""
    ended: Mapping[str, int]
    """Requests that have ended, by how."""
    bystanders: int
    harmed: int
    gauges: Mapping[str, tuple[float, float | None]]
    """Gauge → its last value and its baseline."""
    findings: tuple[Finding, ...]
    lost_clients: tuple[LostClient, ...]


class Seen:
    """The findings of a storm that still blows. Owned by the storm."""

    def __init__(self) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._phases = 0

    def due(self, phases: int, records: int) -> bool:
        """Whether a phase has ended since the last look."""
        ended, self._phases = phases > self._phases, phases
        return ended and records <= LOOK_LIMIT

    def look(self, result: StormResult, *, settled: bool) -> None:
        """`result` is what there is so far."""
        self.findings = tuple(one for one in find(result) if settled or one.name in _AT_ONCE)
