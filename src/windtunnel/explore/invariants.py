"""The invariants that every serving system owes its users, by number and name. A model adds its own from 10 on."""

from typing import NamedTuple


class Invariant(NamedTuple):
    """What must hold. The number is part of the JSON output and of replay files: never reuse one."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


NO_STEP_FAILS = Invariant(0, "no step fails an assertion of its own")
TERMINAL_STICKS = Invariant(1, "terminal states stick")
RELEASED_ONCE = Invariant(2, "each resource is released once")
NO_WRITE_TO_FREED_PAGE = Invariant(3, "nothing is written into a freed page")
ENDS_ONCE = Invariant(4, "every request ends exactly once on each leg")
ABORTED_OUTPUT_STOPS = Invariant(5, "an aborted request's output stops")
PROGRESS = Invariant(6, "after the faults stop, everything makes progress")

COMMON = (NO_STEP_FAILS, TERMINAL_STICKS, RELEASED_ONCE, NO_WRITE_TO_FREED_PAGE, ENDS_ONCE, ABORTED_OUTPUT_STOPS, PROGRESS)
