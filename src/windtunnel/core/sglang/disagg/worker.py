"""What both P/D workers have in common: requests with rooms, finite slots and rows, one manager for each rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from windtunnel.core.outputs import EngineError, Refusal
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.prefill_rank import ABORTED
from windtunnel.core.sglang.disagg.sender import KvEnd
from windtunnel.core.sglang.disagg.slots import SlotPool
from windtunnel.core.sglang.operated import OperatedLoop
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.profiles import Profile
from windtunnel.core.sglang.sequence import SglangSequence
from windtunnel.core.transfer.frames import Outgoing
from windtunnel.core.transfer.status import StatusTable

NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."

QUEUE_ABORT = EngineError(ABORTED, 500, "InternalServerError")


class Rank(Protocol):
    """One attention-TP rank's KV manager."""

    table: StatusTable
    counters: Counter[str]
    outgoing: list[Outgoing]


class RoomEntry:
    """One request on a P/D worker, with what it holds besides KV."""

    __slots__ = ("address", "room", "row", "sequence", "slot")

    def __init__(self, sequence: SglangSequence, address: str, room: int) -> None:
        self.sequence = sequence
        self.address = address
        """bootstrap_host:port."""
        self.room = room
        self.slot: int | None = None
        """Metadata buffer slot."""
        self.row: int | None = None
        """Request-pool row."""


class DisaggWorker(OperatedLoop):
    """Base of the two workers."""

    def __init__(self, config: SglangEngineConfig, disagg: DisaggConfig, pacing: Pacing, chance: Chance, rows: int) -> None:
        super().__init__(config, pacing, chance)
        self.disagg = disagg
        self.rows = SlotPool("request-pool row", rows)
        self.slots = SlotPool("metadata slot", disagg.metadata_slots or 2 * rows)
        self.observations: list[tuple[str, float]] = []
        """(histogram stem, value) since the last `take_observations`."""
        self.queries: list[Outgoing] = []

    @property
    def profile(self) -> Profile:
        return self.disagg.profile

    # To be filled in

    @property
    def managers(self) -> Sequence[Rank]:
        raise NotImplementedError

    def entry_of(self, sequence: SglangSequence) -> RoomEntry:
        raise NotImplementedError

    def queue_of(self, sequence: SglangSequence) -> str:
        """The name of the queue a request is in."""
        raise NotImplementedError

    # What both do

    def count(self, counter: str) -> None:
        for rank in self.managers:
            rank.counters[counter] += 1

    def take_outgoing(self) -> list[Outgoing]:
        """Frames and questions to send, in order for each rank."""
        taken, self.queries = self.queries, []
        for rank in self.managers:
            taken += rank.outgoing
            rank.outgoing = []
        return taken

    def take_observations(self) -> list[tuple[str, float]]:
        taken, self.observations = self.observations, []
        return taken

    def counters(self, rank: int = 0) -> Mapping[str, int]:
        """Cumulative counters of one rank, live, by stem."""
        return Counter(self.managers[rank].counters)

    @property
    def quiet(self) -> bool:
        return self.idle or (self.disagg.report_while_stalled and self.batch is None)

    def resources(self, sequence: SglangSequence) -> Mapping[str, Any]:
        entry = self.entry_of(sequence)
        status = [rank.table.get(entry.room) for rank in self.managers]
        held = {
            "queue": self.queue_of(sequence),
            "room": entry.room,
            "status": [None if item is None else item.name for item in status],
            "metadata_slot": entry.slot,
            "row": entry.row,
        }
        return {**held, **super().resources(sequence)}

    def outstanding(self) -> dict[str, int]:
        """What is held by anybody or by nobody: the debug counters of reference §11.1."""
        memory = self.scheduler.memory
        return {
            "rooms": sum(len(rank.table) for rank in self.managers),
            "metadata_slots": len(self.slots.owners),
            "rows": len(self.rows.owners),
            "pages": memory.used_tokens // memory.page_size,
            "locked_pages": memory.tree.protected_pages,
        }

    def ownerless_slots(self) -> Mapping[int, str]:
        """Slots held for a request that has gone, with the tag they are held under."""
        return {}

    def check_integrity(self) -> None:
        super().check_integrity()
        entries = [self.entry_of(sequence) for sequence in self.sequences.values()]
        slots = {entry.slot: entry.sequence.tag for entry in entries if entry.slot is not None}
        self.slots.check_integrity({**slots, **self.ownerless_slots()})
        self.rows.check_integrity({entry.row: entry.sequence.tag for entry in entries if entry.row is not None})


def refusal_without_room(requests: Sequence[EngineRequest]) -> Refusal | None:
    if all(request.bootstrap is not None for request in requests):
        return None
    return Refusal("no_room", NO_ROOM, 400, "BadRequestError")


def failure_message(what: str, prefix: str, entry: RoomEntry, ends: Sequence[KvEnd]) -> str:
    """The text that SGLang's logs and answers are searched for. The first rank with a reason of its own gives it."""
    reasons = [end.reason for end in ends]
    known = [reason for reason in reasons if "unknown reason" not in reason]
    rank = reasons.index(known[0]) if known else 0
    return (
        f"{what} for request rank={rank} {prefix}.rid={entry.sequence.request_id} {prefix}.bootstrap_room={entry.room} "
        f"with exception {reasons[rank]}"
    )
