"""The cores that a server's engine and front end share with each other and with other jobs of the machine.

Who asks for more cores than there are gets them in equal parts: a piece of work takes `Machine.stretch` times as long as it would
alone. What other jobs take is not the server's doing: it is an input, as the number of clients is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` of 0: as many as anyone asks for."""

    cores: int = 0
    engine_cores: float = 1.0
    """How many cores a step keeps busy. The front end's loop is one thread."""

    def engine_stretch(self, other_jobs: float) -> float:
        """Of a step beside an idle front end."""
        return self._stretch(self.engine_cores, other_jobs)

    def shared_stretch(self, other_jobs: float) -> float:
        """Of a step and of the front end's work while both run."""
        return self._stretch(self.engine_cores + 1, other_jobs) / self._stretch(self.engine_cores + 1, 0.0)

    def _stretch(self, wanted: float, other_jobs: float) -> float:
        """Other jobs run or do not, so 0.5 cores are one core half of the time. They leave at least one."""
        if not self.cores:
            return 1.0
        most = min(max(other_jobs, 0.0), self.cores - 1)
        whole, part = divmod(most, 1)
        fewer = max(1.0, wanted / (self.cores - whole))
        return fewer + part * (max(1.0, wanted / (self.cores - whole - 1)) - fewer) if part else fewer


@dataclass(frozen=True, slots=True)
class OtherJobs:
    """Cores that other jobs take: `cores[i]` up to `until_ns[i]`, the last one for good."""

    until_ns: Sequence[int] = ()
    cores: Sequence[float] = (0.0,)

    def at(self, now_ns: int) -> float:
        return self.cores[min(bisect_right(self.until_ns, now_ns), len(self.cores) - 1)]


NO_OTHER_JOBS = OtherJobs()
