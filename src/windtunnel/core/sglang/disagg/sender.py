"""The prefill's end of one room on one rank (SGLang reference §1.5)."""

from typing import Protocol

from windtunnel.core.sglang.disagg.prefill_rank import ABORTED, PrefillRank
from windtunnel.core.transfer.backends import HandleState
from windtunnel.core.transfer.frames import Aux
from windtunnel.core.transfer.status import KVPoll
from windtunnel.core.units import S


class KvEnd(Protocol):
    """Either end of a room."""

    @property
    def reason(self) -> str:
        """Why it failed."""
        ...


class KvSender(KvEnd, Protocol):
    """What the prefill scheduler drives; `RoomSender` and the fake one implement it."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens at the start of the prompt that the decode has already."""
        ...

    def init(self) -> None: ...

    def send(self, first: int, count: int, aux: Aux | None, now_ns: int) -> None: ...

    def poll(self, now_ns: int) -> KVPoll:
        """Raises KeyError for a room that has vanished, in releases that look it up plainly."""
        ...

    def abort(self) -> None: ...

    def clear(self) -> None:
        """Forget the room."""
        ...

    def disown(self) -> None:
        """Go away and leave the room's records behind."""
        ...

    def deadline_ns(self) -> int | None:
        """When a `poll` will find a timeout."""
        ...


class RoomSender:
    """Owned by its request."""

    def __init__(self, rank: PrefillRank, room: int, now_ns: int) -> None:
        self._rank = rank
        self._room = room
        self._created_ns = now_ns
        self._transferring_ns: int | None = None
        self._latch: KVPoll | None = None
        """`conclude_state`; read by `poll` only in releases that do so."""
        self._last_sent = False
        rank.open(room)

    @property
    def prefix_tokens(self) -> int:
        targets = self._rank.destinations.get(self._room, {}).values()
        return min((target.prefix_tokens for target in targets), default=0)

    @property
    def reason(self) -> str:
        return f"KVTransferError(bootstrap_room={self._room}): {self._rank.reason(self._room)}"

    def init(self) -> None:
        """The metadata slot is allocated: nothing to do here."""

    def send(self, first: int, count: int, aux: Aux | None, now_ns: int) -> None:
        self._last_sent = self._last_sent or aux is not None
        self._rank.send(self._room, first, count, aux, now_ns)

    def poll(self, now_ns: int) -> KVPoll:
        profile = self._rank.config.profile
        if profile.sender_latch and self._latch is not None:
            return self._latch
        handles = self._rank.inline.get(self._room)
        if handles:
            return self._poll_handles(handles)
        status = self._rank.table.check_status(self._room)
        if self._timed_out(status, now_ns):
            status = KVPoll.FAILED
        if status in (KVPoll.SUCCESS, KVPoll.FAILED):
            self._latch = status
        return status

    def _poll_handles(self, handles: list[int]) -> KVPoll:
        """Releases without workers: the poll looks at the transport itself and never shows Transferring."""
        states = [self._rank.backend.state(handle) for handle in handles]
        if HandleState.ERROR in states:
            self._rank.fail(self._room, "the transport reports an error")
            return KVPoll.FAILED
        done = self._last_sent and all(state is HandleState.DONE for state in states)
        return KVPoll.SUCCESS if done else KVPoll.WAITING_FOR_INPUT

    def _timed_out(self, status: KVPoll, now_ns: int) -> bool:
        if status is KVPoll.TRANSFERRING and self._transferring_ns is None:
            self._transferring_ns = now_ns
        for state, since_ns, limit_ns in self._limits():
            if status is state and now_ns - since_ns >= limit_ns:
                seconds = (now_ns - since_ns) / S
                self._rank.fail(self._room, f"Request {self._room} timed out after {seconds:.1f}s in KVPoll.{_NAMES[state]}")
                return True
        return False

    def _limits(self) -> list[tuple[KVPoll, int, int]]:
        config, limits = self._rank.config, []
        if config.profile.bootstrap_timeout:
            limits.append((KVPoll.BOOTSTRAPPING, self._created_ns, config.bootstrap_timeout_ns))
        if config.transferring_timeout_ns is not None and self._transferring_ns is not None:
            limits.append((KVPoll.TRANSFERRING, self._transferring_ns, config.transferring_timeout_ns))
        return limits

    def deadline_ns(self) -> int | None:
        status = self._rank.table.get(self._room)
        return min((since_ns + limit_ns for state, since_ns, limit_ns in self._limits() if state is status), default=None)

    def abort(self) -> None:
        """What an AbortReq does: in releases before the table was written, nothing that a poll would see."""
        if self._rank.config.profile.sender_abort_fails:
            self._rank.fail(self._room, ABORTED)
        self._latch = KVPoll.FAILED

    def clear(self) -> None:
        self._rank.clear(self._room)

    def disown(self) -> None:
        self._rank.disown(self._room)


_NAMES = {KVPoll.BOOTSTRAPPING: "Bootstrapping", KVPoll.TRANSFERRING: "Transferring"}
