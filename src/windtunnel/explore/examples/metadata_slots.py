"""SGLang #17483 (SGLang reference, P14): an abort in the waiting queue leaks a metadata slot.

A prefill takes a metadata slot when a request's bootstrap ends and gives it back when the request leaves the inflight queue. An
abort between the two lost the slot. After as many aborts as there are slots no request leaves the bootstrap queue.
"""

from windtunnel.explore import PROGRESS, RELEASED_ONCE, Model, Steps, always, eventually, parameter, process

SLOTS = 1
REQUESTS = ("first", "second")


class MetadataSlots(Model):
    """A request takes a slot; an abort while it waits must give the slot back, once."""

    fix: str = parameter("before", choices=("before", "hasty", "after"), help="hasty: both ends give the slot back")

    free: int = SLOTS
    aborted: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()

    @process(*REQUESTS)
    def request(self, name: str) -> Steps:
        yield "leaves the bootstrap queue with a slot", lambda: self.free > 0
        self.free -= 1
        yield "is taken from the waiting queue"
        if name in self.aborted:
            self.ended |= {name}
            self.free += self.fix != "before"
            if self.fix != "hasty":
                return
        yield "leaves the inflight queue"
        self.free += 1
        self.ended |= {name}

    @process(*(f"client of {name}" for name in REQUESTS), fault=True)
    def client(self, lane: str) -> Steps:
        yield "goes away"
        self.aborted |= {lane.removeprefix("client of ")}

    @always(RELEASED_ONCE)
    def never_too_many(self) -> bool:
        return self.free <= SLOTS

    @eventually(PROGRESS)
    def all_end(self) -> bool:
        return self.ended == frozenset(REQUESTS) and self.free == SLOTS
