"""The decode's end of one room on one rank (SGLang reference §1.5)."""

from typing import Protocol

from windtunnel.core.sglang.disagg.decode_rank import Arrivals, DecodeRank
from windtunnel.core.sglang.disagg.prefill_rank import ABORTED
from windtunnel.core.sglang.disagg.sender import KvEnd
from windtunnel.core.sglang.disagg.topology import Targets
from windtunnel.core.transfer.frames import Abort, Metadata
from windtunnel.core.transfer.status import KVPoll
from windtunnel.core.units import S


class KvReceiver(KvEnd, Protocol):
    """What the decode scheduler drives; `RoomReceiver` and the fake one implement it."""

    def send_metadata(self, pages: tuple[int, ...], stamp: int, slot: int, prefix_tokens: int, now_ns: int) -> None: ...

    def poll(self, now_ns: int) -> KVPoll: ...

    def abort(self) -> None: ...

    def clear(self) -> None: ...

    def deadline_ns(self) -> int | None: ...


class RoomReceiver:
    """Owned by its request."""

    def __init__(self, rank: DecodeRank, room: int, generation: int, now_ns: int) -> None:
        """`generation` tells this use of the room number from any other."""
        self._rank = rank
        self._room = room
        self._generation = generation
        self._created_ns = now_ns
        self._started_ns: int | None = None
        self._targets: Targets | None = None
        self._latch: KVPoll | None = None
        self.timed_out = False
        self.awaits_ack = False
        """An ABORT frame is out that asks for acknowledgements."""
        rank.open(room)

    @property
    def reason(self) -> str:
        return f"KVTransferError(bootstrap_room={self._room}): {self._rank.reason(self._room)}"

    def init(self, targets: Targets) -> None:
        """The prefill's ranks are known."""
        self._targets = targets
        self._rank.arrivals[self._room] = Arrivals(len(targets.ranks))
        self._rank.table.update(self._room, KVPoll.WAITING_FOR_INPUT)

    def fail(self, reason: str) -> None:
        self._rank.fail(self._room, reason)

    def send_metadata(self, pages: tuple[int, ...], stamp: int, slot: int, prefix_tokens: int, now_ns: int) -> None:
        """Tell every target where to write. The waiting clock starts here."""
        assert self._targets is not None, "metadata without targets"
        clock = self._rank.config.waiting_clock
        self._started_ns = now_ns if clock == "metadata" else self._created_ns
        required = self._targets.required_dst_info_num
        for endpoint in self._targets.endpoints:
            frame = Metadata(self._room, self._rank.endpoint, pages, stamp, slot, required, prefix_tokens)
            self._rank.send(endpoint, frame)

    def poll(self, now_ns: int) -> KVPoll:
        if self._latch is not None:
            return self._latch
        profile = self._rank.config.profile
        if profile.drain_before_timeout:
            self._rank.drain()
        if self._expired(now_ns):
            return KVPoll.FAILED
        self._rank.drain()
        status = self._rank.table.check_status(self._room)
        if status in (KVPoll.SUCCESS, KVPoll.FAILED):
            self._latch = status
        return status

    def _expired(self, now_ns: int) -> bool:
        """The waiting timeout: Failed, and the prefill is told."""
        deadline_ns = self.deadline_ns()
        if deadline_ns is None or now_ns < deadline_ns:
            return False
        seconds = (now_ns - (self._started_ns or 0)) / S
        self.fail(f"Request {self._room} timed out after {seconds:.1f}s in KVPoll.WaitingForInput")
        self.timed_out = True
        self._latch = KVPoll.FAILED
        self._notify()
        return True

    def deadline_ns(self) -> int | None:
        if self._started_ns is None or self._rank.table.get(self._room) is not KVPoll.WAITING_FOR_INPUT:
            return None
        return self._started_ns + self._rank.config.waiting_timeout_ns

    def abort(self) -> None:
        self.fail(ABORTED)
        self._latch = KVPoll.FAILED
        self._notify()

    def _notify(self) -> None:
        """The ABORT frame, in releases that have one."""
        config = self._rank.config
        if not config.profile.decode_sends_abort or self._targets is None or self.awaits_ack:
            return
        generation = self._generation if config.defers_release else None
        for endpoint in self._targets.endpoints:
            self._rank.send(endpoint, Abort(self._room, self._rank.endpoint, generation))
        if generation is not None:
            self.awaits_ack = True
            self._rank.acks[self._room, generation] = set()

    @property
    def acknowledged(self) -> bool:
        """All targets have said that they write no more."""
        assert self._targets is not None, "an acknowledgement without targets"
        return self._rank.acks[self._room, self._generation] >= set(self._targets.ranks)

    def forget_acks(self) -> None:
        self._rank.acks.pop((self._room, self._generation), None)

    def clear(self) -> None:
        self._rank.clear(self._room)
