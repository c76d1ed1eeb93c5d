"""Where sequences wait: the queue proper, and those that cannot run yet for a reason of their own."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from windtunnel.core.vllm.sequence import VllmSequence

Rank = tuple[int, int, int]


def fcfs_rank(sequence: VllmSequence) -> Rank:
    return (0, 0, sequence.arrived)


def priority_rank(sequence: VllmSequence) -> Rank:
    """Lower runs first; ties go by arrival."""
    return (sequence.request.priority, sequence.request.arrival_ns, sequence.arrived)


class WaitingQueue:
    """Sequences by rank. Removal by identity is lazy, but for the head: a queue that is empty holds on to nobody."""

    def __init__(self, rank: Callable[[VllmSequence], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, VllmSequence]] = []
        self._members: dict[VllmSequence, Rank] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: VllmSequence) -> None:
        rank = self._rank(sequence)
        self._members[sequence] = rank
        heappush(self._heap, (rank, sequence))

    def peek(self) -> VllmSequence:
        """The head. The queue is not empty."""
        return self._heap[0][1]

    def remove(self, sequence: VllmSequence) -> None:
        del self._members[sequence]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(rank, member) for member, rank in self._members.items()]
            heapify(self._heap)
        while self._heap and self._members.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)

    def members(self) -> Iterable[VllmSequence]:
        return self._members

    def in_order(self) -> list[VllmSequence]:
        return sorted(self._members, key=self._members.__getitem__)


class DeferredSet:
    """Sequences that admission skips: until a time (a grammar compiles), a release, or until their adapter gets a slot."""

    def __init__(self) -> None:
        self._until: list[tuple[int, int, VllmSequence]] = []
        self._by_lora: dict[int, dict[VllmSequence, None]] = {}
        self._held: set[VllmSequence] = set()
        self._members: dict[VllmSequence, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def hold(self, sequence: VllmSequence) -> None:
        """Until `take_held`."""
        self._members[sequence] = None
        self._held.add(sequence)

    def take_held(self, sequence: VllmSequence) -> bool:
        """True: it was held, and is not any more."""
        held = sequence in self._held
        if held:
            self.remove(sequence)
        return held

    def add_until(self, sequence: VllmSequence, until_ns: int) -> None:
        self._members[sequence] = None
        heappush(self._until, (until_ns, sequence.arrived, sequence))

    def add_for_lora(self, sequence: VllmSequence, lora_id: int) -> None:
        self._members[sequence] = None
        self._by_lora.setdefault(lora_id, {})[sequence] = None

    def remove(self, sequence: VllmSequence) -> None:
        del self._members[sequence]
        self._held.discard(sequence)
        lora = sequence.request.lora
        group = self._by_lora.get(lora.lora_id) if lora else None
        if lora and group is not None:
            group.pop(sequence, None)
            if not group:
                del self._by_lora[lora.lora_id]

    def next_at(self) -> int | None:
        """When the first of those that wait for a time may go on."""
        self._drop_stale()
        return self._until[0][0] if self._until else None

    def take_due(self, now_ns: int) -> list[VllmSequence]:
        due: list[VllmSequence] = []
        while (at := self.next_at()) is not None and at <= now_ns:
            sequence = heappop(self._until)[2]
            self.remove(sequence)
            due.append(sequence)
        return due

    def take_for_loras(self, running: set[int], slots: int) -> list[VllmSequence]:
        """Those whose adapter runs or finds one of `slots`; adapters in the order in which they began to wait."""
        taken: list[VllmSequence] = []
        allowed = set(running)
        for lora_id in list(self._by_lora):
            if lora_id in allowed or len(allowed) < slots:
                allowed.add(lora_id)
                taken += self._by_lora.pop(lora_id)
        for sequence in taken:
            del self._members[sequence]
        return taken

    def members(self) -> Iterable[VllmSequence]:
        return self._members

    def in_order(self) -> list[VllmSequence]:
        return sorted(self._members, key=lambda sequence: sequence.arrived)

    def _drop_stale(self) -> None:
        while self._until and self._until[0][2] not in self._members:
            heappop(self._until)


class ReadyTimes:
    """When each running sequence next takes part in a step, for pacing by sequence. One entry for each running place."""

    def __init__(self) -> None:
        self._later: list[tuple[int, int]] = []
        self._due: list[int] = []
        """Places whose time had come when they were put here: they skip the heap."""

    def push(self, at_ns: int, run_order: int, now_ns: int) -> None:
        if at_ns <= now_ns:
            self._due.append(run_order)
        else:
            heappush(self._later, (at_ns, run_order))

    def next_at(self, running: dict[int, VllmSequence]) -> int | None:
        """The first time; 0 for at once."""
        while self._due:
            if self._due[-1] in running:
                return 0
            self._due.pop()
        while self._later and self._later[0][1] not in running:
            heappop(self._later)
        return self._later[0][0] if self._later else None

    def take_due(self, now_ns: int, running: dict[int, VllmSequence]) -> list[VllmSequence]:
        """The running sequences whose time has come, in the order of the running list."""
        later, due = self._later, self._due
        self._due = []
        while later and later[0][0] <= now_ns:
            due.append(heappop(later)[1])
        due.sort()
        return [running[order] for order in due if order in running]
