"""What a finding is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from windtunnel.lab.record import StormResult

EVIDENCE_LIMIT = 12


class Severity(Enum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class FindingKind:
    name: str
    severity: Severity
    cause: str
    """The usual cause, in one line."""
    look: Callable[[StormResult], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    severity: Severity
    cause: str
    evidence: tuple[str, ...]
    """At most `EVIDENCE_LIMIT` sentences, then how many more there were."""
    count: int
    consequence_of: str | None = None
    """The finding of the same storm that explains all of this one."""
