"""The discrete-event kernel: a heap of things to do, ordered by time and then by when they were asked for.

Time is an integer number of nanoseconds and moves only from one action to the next. Randomness comes in named streams: each
name has its own generator, so a further draw in one part of the model moves nothing in another. Same seed, same calls: same
run, byte for byte.
"""

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush

Action = Callable[[], None]


class Timer:
    """One thing to do at one time. `cancel` may come at any moment, also after it has run."""

    __slots__ = ("action", "at_ns")

    def __init__(self, at_ns: int, action: Action) -> None:
        self.at_ns = at_ns
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Kernel:
    """Owns virtual time. One run, one kernel."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = 0
        self._streams: dict[str, random.Random] = {}
        self._compact_above = 1 << 16

    def at(self, at_ns: int, action: Action) -> Timer:
        """Do `action` at `at_ns`; what lies in the past is done at once, after what is already due."""
        timer = Timer(max(at_ns, self.now_ns), action)
        self._order += 1
        heappush(self._heap, (timer.at_ns, self._order, timer))
        if len(self._heap) > self._compact_above:
            self._compact()
        return timer

    def after(self, delay_ns: int, action: Action) -> Timer:
        return self.at(self.now_ns + delay_ns, action)

    def stream(self, name: str) -> random.Random:
        """The generator of this name; equal for equal (seed, name)."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self.seed}/{name}")
        return found

    @property
    def next_at(self) -> int | None:
        """When the next action is due; None without one."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def run(self, until_ns: int | None = None, max_events: int | None = None) -> bool:
        """Do everything due up to `until_ns`. False if `max_events` came first."""
        left = -1 if max_events is None else max_events
        while (at_ns := self.next_at) is not None:
            if until_ns is not None and at_ns > until_ns:
                break
            if not left:
                return False
            left -= 1
            self.step()
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)
        return True

    def step(self) -> None:
        """Do the next action. There is one."""
        at_ns, _order, timer = heappop(self._heap)
        action, timer.action = timer.action, None
        assert action is not None, "step without an action"
        self.now_ns = at_ns
        self.events += 1
        action()

    def _compact(self) -> None:
        """Drop cancelled timers (time-outs that never came) before they outnumber the live ones."""
        self._heap = [entry for entry in self._heap if entry[2].action is not None]
        heapify(self._heap)
        self._compact_above = max(1 << 16, 2 * len(self._heap))
