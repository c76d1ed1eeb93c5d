"""The pd-abort-storm investigation as a model: who may write a room's status, and what the merge rule makes of it.

The table is the real one, `windtunnel.core.transfer.status`, under each of its five rules (SGLang reference §1.3). Around it
stand the threads of a NIXL prefill as they were in 0.5.12 to 0.5.15 (§1.5, §1.6), so that only the rule differs:

* Room 7 is in flight: WaitingForInput, its last chunk on the worker's queue, an AbortReq for it on the way.
* Room 8 is in the bootstrap queue: Bootstrapping, its decode about to send metadata, a time-out possible.

With `atomic` an update is one step; without, its read-and-compare and its store are two, as there is no lock (§1.2). `shields`
adds the two guards of 0.5.22 and later: the poll looks at the sender's latch first, and a Success with a failure on record is
concluded as Failed. With `deferred` the decode of room 7 frees its pages only when the abort has been recorded and no chunk is
under way; without, it frees them when it gives up, as before 0.5.20 (reference, P30).

Invariant 1 is judged by the end: a room that has failed ends a second time, as a success. The store that makes it possible, a
Transferring over a Failed, is visible two steps before.
"""

from collections.abc import Mapping
from typing import NamedTuple

from windtunnel.core.transfer.status import RULES, KVPoll, MissingRoom, PendingWrite, StatusTable
from windtunnel.explore import (
    ABORTED_OUTPUT_STOPS,
    NO_WRITE_TO_FREED_PAGE,
    PROGRESS,
    TERMINAL_STICKS,
    Invariant,
    Model,
    Steps,
    always,
    eventually,
    parameter,
    process,
)
from windtunnel.explore.model import Guard

RULE_OF_ERA: Mapping[str, str] = dict(zip("abcde", RULES, strict=True))

IN_FLIGHT, IN_BOOTSTRAP = 7, 8
WORKER, SCHEDULER, BOOTSTRAP_THREAD, NEXT_REQUEST = "transfer worker", "scheduler", "bootstrap thread", "next request"


class Room(NamedTuple):
    """A room's entry in the table, and what has been done to it."""

    status: KVPoll | None
    cleared: bool = False
    failed: bool = False
    """Failed has been stored since the room was created."""
    reason: bool = False
    """A failure is on record (`failure_records`)."""


class KVStatus(Model):
    """A late Transferring meets an abort's Failed: the status table of a prefill under SGLang's rules (a) to (e)."""

    rule: str = parameter("e", choices="abcde", help="merge rule of the table")
    atomic: bool = parameter(True, help="an update is one step; false: read and store are two")
    shields: bool = parameter(False, help="latch and failure record of SGLang 0.5.22 and later")
    deferred: bool = parameter(True, help="the decode frees its pages when the worker is done with them")
    chunks: int = parameter(1, help="chunks of room 7 on the worker's queue")

    room_7: Room = Room(KVPoll.WAITING_FOR_INPUT)
    room_8: Room = Room(KVPoll.BOOTSTRAPPING)
    latch_7: bool = False
    peer_7_is_gone: bool = False
    chunk_under_way: bool = False
    pages_freed: bool = False
    written_after_free: bool = False
    started_after_abort: bool = False
    answer_7: str = ""
    answer_8: str = ""
    time_is_up_8: bool = False
    frames_8: int = 0
    born_again_8: KVPoll | None = None
    re_created_by: frozenset[str] = frozenset()
    resurrected: bool = False
    success_lost: bool = False
    failed_lost: bool = False

    @process
    def scheduler(self) -> Steps:
        yield from self._update(IN_FLIGHT, KVPoll.FAILED, "AbortReq: records the reason, writes Failed", SCHEDULER)
        self.latch_7 = True
        yield "polls room 7: it has ended", lambda: self._poll() in (KVPoll.FAILED, KVPoll.SUCCESS)
        self.answer_7 = "abort" if self._poll() is KVPoll.FAILED else "length"
        self._clear(IN_FLIGHT)

    @process
    def transfer_worker(self) -> Steps:
        left = self.chunks
        while left:
            yield "pops a chunk of room 7, looks at its status"
            if self.room_7.status in (None, KVPoll.FAILED):
                return
            self.chunk_under_way, aborted = True, self.room_7.failed
            yield from self._update(IN_FLIGHT, KVPoll.TRANSFERRING, "writes Transferring", WORKER)
            yield "posts the writes to the decode's pages"
            self.started_after_abort |= aborted
            left -= 1
            yield from self._chunk_done() if left else self._conclude()
            self.written_after_free |= self.pages_freed
            self.chunk_under_way = False

    @process("decode of room 7", fault=True)
    def decode_in_flight(self, _name: str) -> Steps:
        yield "gives up: frees its pages", lambda: not self.deferred or (self._abort_stands() and not self.chunk_under_way)
        self.pages_freed = True

    @process(fault=True)
    def peer(self) -> Steps:
        yield "is gone: the handle stays in progress"
        self.peer_7_is_gone = True

    @process
    def bootstrap_queue(self) -> Steps:
        yield "polls room 8", lambda: self.room_8.status is not KVPoll.BOOTSTRAPPING or self.time_is_up_8
        if self.room_8.status is KVPoll.WAITING_FOR_INPUT:
            self.answer_8 = "admitted"
            return
        yield from self._update(IN_BOOTSTRAP, KVPoll.FAILED, "time-out: writes Failed", SCHEDULER)
        yield "polls room 8: Failed, answers and clears"
        self.answer_8 = "timed out"
        self._clear(IN_BOOTSTRAP)

    @process
    def bootstrap_thread(self) -> Steps:
        name = "metadata of room 8: writes WaitingForInput"
        yield from self._update(IN_BOOTSTRAP, KVPoll.WAITING_FOR_INPUT, name, BOOTSTRAP_THREAD, lambda: self.frames_8 >= 1)
        yield "reads the ABORT of room 8", lambda: self.frames_8 >= 2
        if self.room_8.status not in (None, KVPoll.SUCCESS):
            yield from self._update(IN_BOOTSTRAP, KVPoll.FAILED, "writes Failed", BOOTSTRAP_THREAD)

    @process("decode of room 8")
    def decode_in_bootstrap(self, _name: str) -> Steps:
        yield "sends the metadata of room 8"
        self.frames_8 = 1
        yield "has waited too long: sends ABORT", lambda: self.answer_8 == "timed out"
        self.frames_8 = 2

    @process(fault=True)
    def clock(self) -> Steps:
        yield "the bootstrap time-out of room 8 passes"
        self.time_is_up_8 = True

    @process(fault=True)
    def next_request(self) -> Steps:
        name = "is given the number 8 again: writes Bootstrapping"
        yield from self._update(IN_BOOTSTRAP, KVPoll.BOOTSTRAPPING, name, NEXT_REQUEST, lambda: self.answer_8 == "timed out")
        self.born_again_8 = self.room_8.status

    @always(TERMINAL_STICKS)
    def terminal_sticks(self) -> bool:
        """A room that has failed does not end a second time, as a success."""
        return not self.resurrected

    @always(NO_WRITE_TO_FREED_PAGE)
    def pages_are_safe(self) -> bool:
        return not self.written_after_free

    @always(ABORTED_OUTPUT_STOPS)
    def output_stops(self) -> bool:
        """No chunk is begun after Failed was recorded."""
        return not self.started_after_abort

    @always(Invariant(10, "a Success is not overwritten by Failed"))
    def success_sticks(self) -> bool:
        return not self.success_lost

    @always(Invariant(11, "the transfer worker re-creates no cleared room"))
    def worker_makes_no_zombie(self) -> bool:
        return WORKER not in self.re_created_by

    @always(Invariant(12, "late metadata re-creates no cleared room"))
    def metadata_makes_no_zombie(self) -> bool:
        return BOOTSTRAP_THREAD not in self.re_created_by

    @always(Invariant(13, "a room number that is used again starts afresh"))
    def starts_afresh(self) -> bool:
        return self.born_again_8 in (None, KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT)

    @always(Invariant(14, "no update overwrites a Failed that it has not read"))
    def no_lost_failed(self) -> bool:
        return not self.failed_lost

    @always(Invariant(15, "an aborted request is not answered as a success"))
    def abort_is_answered(self) -> bool:
        return self.answer_7 != "length"

    @eventually(PROGRESS)
    def both_are_answered(self) -> bool:
        return bool(self.answer_7 and self.answer_8)

    def _chunk_done(self) -> Steps:
        name = "chunk done: writes Transferring"
        yield from self._update(IN_FLIGHT, KVPoll.TRANSFERRING, name, WORKER, lambda: not self.peer_7_is_gone)

    def _conclude(self) -> Steps:
        """Once the last chunk's handle is done, which takes a living peer."""
        if not self.shields:
            name = "last chunk done: writes Success"
            yield from self._update(IN_FLIGHT, KVPoll.SUCCESS, name, WORKER, lambda: not self.peer_7_is_gone)
            return
        yield "last chunk done: looks at the failure record", lambda: not self.peer_7_is_gone
        if self.room_7.status is not None:
            status = KVPoll.FAILED if self.room_7.reason or self.room_7.status is KVPoll.FAILED else KVPoll.SUCCESS
            yield from self._update(IN_FLIGHT, status, f"concludes: writes {status.name.title()}", WORKER)

    def _update(self, room: int, status: KVPoll, name: str, writer: str, when: Guard = lambda: True) -> Steps:
        """One update of the real table: one step, or a read with its comparison and then a store."""
        yield (name if self.atomic else f"{name} (reads)"), when
        if status is KVPoll.FAILED:
            self._keep(room, self._room(room)._replace(reason=True))
        pending = self._table(room).begin_update(room, status)
        if not self.atomic:
            yield f"{name} (stores)"
        self._commit(pending, writer)

    def _commit(self, pending: PendingWrite, writer: str) -> None:
        before, table = self._room(pending.room), self._table(pending.room)
        table.commit(pending)
        after = table.get(pending.room)
        if before.status is None and after is not None:
            if before.cleared and writer is not NEXT_REQUEST:
                self.re_created_by |= {writer}
            before = Room(None)
        self.resurrected |= before.failed and after is KVPoll.SUCCESS
        self.success_lost |= before.status is KVPoll.SUCCESS and after is KVPoll.FAILED
        self.failed_lost |= (
            before.status is KVPoll.FAILED and after not in (None, KVPoll.FAILED) and pending.read is not before.status
        )
        self._keep(pending.room, before._replace(status=after, failed=before.failed or after is KVPoll.FAILED))

    def _abort_stands(self) -> bool:
        return self.room_7.failed or self.room_7.cleared

    def _poll(self) -> KVPoll:
        if self.shields and self.latch_7:
            return KVPoll.FAILED
        return self._table(IN_FLIGHT).check_status(IN_FLIGHT)

    def _table(self, room: int) -> StatusTable:
        """The real table, holding the one room that this step is about."""
        table = StatusTable(RULE_OF_ERA[self.rule], MissingRoom.WAITING)
        status = self._room(room).status
        table.restore([] if status is None else [(room, status)])
        return table

    def _room(self, room: int) -> Room:
        return self.room_7 if room == IN_FLIGHT else self.room_8

    def _keep(self, room: int, value: Room) -> None:
        if room == IN_FLIGHT:
            self.room_7 = value
        else:
            self.room_8 = value

    def _clear(self, room: int) -> None:
        self._keep(room, Room(None, cleared=True))
