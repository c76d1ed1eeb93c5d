"""The cores that an engine's processes and its front end share with each other and with other jobs of the machine.

Whoever want more cores than there are get them in equal parts, so their work takes wanted / free times as long. What other jobs
take is not the server's doing: like the number of clients it is an input, not a finding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor


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
        """A job runs or does not: half a core is a whole one half of the time. Other jobs leave at least one core."""
        if other_cores <= 0 or self.cores <= 1:
            return 1.0
        taken = min(other_cores, self.cores - 1)
        whole = min(floor(taken), self.cores - 2)
        fewer, more = (max(1.0, wanted / (self.cores - jobs)) for jobs in (whole, whole + 1))
        return (fewer + (taken - whole) * (more - fewer)) / max(1.0, wanted / self.cores)


@dataclass(frozen=True, slots=True)
class OtherJobs:
    """Cores that other jobs take: `cores[i]` before `until_ns[i]`, the last one for good. `until_ns` rises."""

    cores: Sequence[float] = (0.0,)
    until_ns: Sequence[int] = ()

    def at(self, now_ns: int) -> float:
        return self.cores[min(bisect_right(self.until_ns, now_ns), len(self.cores) - 1)]


NO_OTHER_JOBS = OtherJobs()
