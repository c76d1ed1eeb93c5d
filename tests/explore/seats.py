"""Two clerks sell the last seat: the model of the documentation, with its fix."""

from windtunnel.explore import Invariant, Model, Steps, always, parameter, process

SOLD_ONCE = Invariant(10, "no seat is sold twice")


class LastSeat(Model):
    """Two clerks look at the last free seat and sell it."""

    locked: bool = parameter(False, help="look and sell are one step")

    free: int = 1
    sold: tuple[str, ...] = ()

    @process("ann", "bob")
    def clerk(self, name: str) -> Steps:
        yield "look"
        seen = self.free
        if seen:
            if not self.locked:
                yield "sell"
            self.free = seen - 1
            self.sold += (name,)

    @always(SOLD_ONCE)
    def once(self) -> bool:
        return len(self.sold) <= 1
