"""A transfer worker keeps its own time, however late its driver looks (SGLang reference §1.6)."""

from windtunnel.core.transfer.backends import SimBackend, Write
from windtunnel.core.transfer.frames import KvChunk
from windtunnel.core.transfer.status import KVPoll, MissingRoom, StatusTable
from windtunnel.core.transfer.worker import Action, Chunk, TransferWorker
from windtunnel.core.units import MS

GAP_NS = 100 * MS


class _Rooms:
    def __init__(self) -> None:
        self.table = StatusTable("nores", MissingRoom("waiting"))
        self.backend = SimBackend(latency_ns=0, bandwidth_gb_s=1e6)

    def writes_of(self, chunk: Chunk) -> list[Write]:
        return [Write("10.0.0.2:7000", KvChunk(chunk.room, chunk.number, chunk.is_last, 0, (), 0, 0), 0)]

    def begin_chunk(self, room: int) -> None: ...

    def end_chunk(self, room: int, *, settled: bool, now_ns: int) -> None: ...

    def chunk_sent(self, chunk: Chunk, now_ns: int) -> None: ...

    def chunk_failed(self, chunk: Chunk, reason: str, *, settled: bool, now_ns: int) -> None: ...


def test_a_late_driver_does_not_shift_the_gap() -> None:
    rooms = _Rooms()
    worker = TransferWorker(rooms, GAP_NS, 0, None)
    for room in (5, 6):
        rooms.table.update(room, KVPoll.WAITING_FOR_INPUT)
        worker.queue.append(Chunk(room, 0, True, 10 * MS))
    late_ns = 40 * MS
    assert worker.next_at(late_ns) == 10 * MS
    assert worker.step(late_ns) is Action.POP
    assert worker.next_at(late_ns) == 10 * MS + GAP_NS
    worker.run(10 * MS + GAP_NS)
    assert worker.action is Action.WAIT
    rooms.backend.run(10 * MS + GAP_NS)
    worker.run(10 * MS + GAP_NS)
    assert (worker.action, worker.next_at(late_ns)) == (Action.READ, 10 * MS + 2 * GAP_NS)
