"""Whether a target has become quiet again after a storm: all gauges at their baseline, in samples that bear witness to it."""

import asyncio

from windtunnel.lab.outlived import watched_ns
from windtunnel.lab.plan import StormPlan
from windtunnel.lab.record import Sample
from windtunnel.lab.sampler import Sampler, is_quiet
from windtunnel.lab.session import Session

QUIET_SAMPLES = 2
"""So many samples in a row must be quiet."""
LEAST_SAMPLES = 8
"""The wait for quiet, and the look after a probe, do not end before so many: a busy machine takes few in the time."""
PATIENCE = 4
"""The wait for quiet does end after so many times its time, or `LEAST_PATIENCE_NS`, whatever was sampled."""
LEAST_PATIENCE_NS = 10_000_000_000


class Quiet:
    """What quiet is for one storm."""

    def __init__(self, session: Session, plan: StormPlan, sampler: Sampler, baseline: Sample) -> None:
        self._session = session
        self._plan = plan
        self._sampler = sampler
        self._baseline = baseline

    async def came(self) -> bool:
        """Whether the samples became quiet before the deadline, which is in witnessed time (`outlived`)."""
        began_ns, wait_ns = self._session.now_ns(), self._plan.quiet_deadline_ns
        patience_ns = max(PATIENCE * wait_ns, LEAST_PATIENCE_NS) if wait_ns else 0
        seen = len(self._sampler.samples)
        while (waited_ns := self._session.now_ns() - began_ns) < patience_ns:
            if waited_ns >= wait_ns and self._looked_for_quiet(seen, began_ns):
                break
            recent = self._sampler.samples[seen:][-QUIET_SAMPLES:]
            if len(recent) == QUIET_SAMPLES and all(self.holds(sample) for sample in recent):
                return True
            await asyncio.sleep(self._plan.sample_every_ns / 2e9)
        return False

    def _looked_for_quiet(self, seen: int, began_ns: int) -> bool:
        """Whether the samples after the first `seen` bear witness to all of the wait."""
        times = [sample.at_ns for sample in self._sampler.samples]
        watched = watched_ns(times, began_ns, self._plan.sample_every_ns)
        return len(times) - seen >= LEAST_SAMPLES and watched >= self._plan.quiet_deadline_ns

    def holds(self, sample: Sample) -> bool:
        return is_quiet(sample, self._baseline, self._sampler.watches())

    def since_ns(self) -> int:
        """The first of the quiet samples at the end of the series."""
        at_ns = self._session.now_ns()
        for sample in reversed(self._sampler.samples):
            if not self.holds(sample):
                break
            at_ns = sample.at_ns
        return at_ns
