"""vLLM #58222 (vLLM reference, entry 41): an expired lease is not reaped behind one that is kept alive.

A prefill node holds the KV blocks of a finished request until its decode node has read them, on a lease that heartbeats
extend. The reaper walked the leases in order of insertion and stopped at the first that had not expired. A heartbeat extends a
lease where it stands, so the order of insertion is not the order of expiry.
"""

from windtunnel.explore import PROGRESS, Invariant, Model, Steps, always, eventually, parameter, process

LEASE_TICKS = 2


class LeaseReaper(Model):
    """A dead decode's lease stands behind a living one's; the reaper stops at the first that is not expired."""

    fixed: bool = parameter(False, help="the reaper looks at every lease")

    leases: tuple[tuple[str, int], ...] = (("living", LEASE_TICKS), ("dead", LEASE_TICKS))
    """(decode, ticks left), in order of insertion."""
    reaped_early: bool = False

    @process
    def living_decode(self) -> Steps:
        while True:
            yield "heartbeat"
            self.leases = tuple((name, LEASE_TICKS if name == "living" else left) for name, left in self.leases)

    @process
    def clock(self) -> Steps:
        while True:
            yield "tick"
            self.leases = tuple((name, max(left - 1, 0)) for name, left in self.leases)

    @process
    def reaper(self) -> Steps:
        while True:
            yield "reap"
            keep = [lease for lease in self.leases if lease[1] > 0]
            if not self.fixed:
                first = next((at for at, (_name, left) in enumerate(self.leases) if left > 0), len(self.leases))
                keep = list(self.leases[first:])
            self.reaped_early |= any(left > 0 for lease, left in self.leases if (lease, left) not in keep)
            self.leases = tuple(keep)

    @always(Invariant(10, "no lease is reaped before it expires"))
    def lasts(self) -> bool:
        return not self.reaped_early

    @eventually(PROGRESS)
    def dead_lease_goes(self) -> bool:
        return all(name != "dead" for name, _left in self.leases)
