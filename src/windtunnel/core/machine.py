"""The cores that an engine's processes and its front end share with each other and with other jobs of the machine.

Work that wants more cores than other jobs leave takes wanted / free times as long; while they take no more than what it leaves
over they do not slow it. What they take is not the server's doing: like the number of clients it is an input, not a finding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` of 0: not known, and other jobs slow nothing."""

    cores: int = 0
    engine_cores: float = 1.5
    """How many cores the engine's processes keep busy beside an idle front end, whose loop is one thread."""

    def engine_stretch(self, other_cores: float) -> float:
        """How many times as long the processors' part of a step takes as without other jobs; the front end is idle."""
        return self._stretch(self.engine_cores, other_cores)

    def shared_stretch(self, other_cores: float) -> float:
        """The same for the front end's work and for the step beside it, while both run."""
        return self._stretch(self.engine_cores + 1, other_cores)

    def _stretch(self, wanted: float, other_cores: float) -> float:
        """Other jobs leave at least one core."""
        if other_cores <= 0 or self.cores <= 1:
            return 1.0
        free = max(1.0, self.cores - other_cores)
        return max(1.0, wanted / free) / max(1.0, wanted / self.cores)


@dataclass(frozen=True, slots=True)
class OtherJobs:
    """Cores that other jobs take: `cores[i]` before `until_ns[i]`, the last one for good. `until_ns` rises."""

    cores: Sequence[float] = (0.0,)
    until_ns: Sequence[int] = ()

    def at(self, now_ns: int) -> float:
        return self.cores[min(bisect_right(self.until_ns, now_ns), len(self.cores) - 1)]


NO_OTHER_JOBS = OtherJobs()
