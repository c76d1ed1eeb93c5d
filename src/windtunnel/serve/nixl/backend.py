"""A `TransferBackend` that moves real bytes: first the modelled time and misfortune of another backend, then the bytes.

What the model lets land is written by the agent, and the handle is done when the peer has checked the bytes. What the model
stalls, fails or loses never reaches NIXL. `run` returns nothing: the peer hears of a write by NIXL's own notification.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from windtunnel.core.transfer.backends import HandleState, TransferBackend, Write
from windtunnel.serve.nixl.agent import KvAgent, Move
from windtunnel.wire.real_bytes import MemoryMap

log = logging.getLogger("windtunnel.serve")


class Modelled(TransferBackend, Protocol):
    """`SimBackend`, or what a planted defect makes of it."""

    def find_peer(self, peer: str) -> None: ...


class RealBytesBackend:
    """Owns nothing but its handles; the agent is its server's."""

    def __init__(self, modelled: Modelled, agent: KvAgent, move_of: Callable[[int, str, Write], Move]) -> None:
        """`move_of(handle, agent's name, write)` says which blocks a write concerns."""
        self.modelled = modelled
        self._agent = agent
        self._move_of = move_of
        self._names: dict[str, str] = {}
        """Agents by the address of their process."""
        self._waiting: dict[int, Write] = {}
        """Still in the model."""
        self._moving: set[int] = set()
        self._failed: set[int] = set()
        self._released: set[int] = set()

    def learn(self, peer: str, name: str, where: MemoryMap) -> None:
        """The memory of the process behind an address."""
        self._names[peer] = name
        self._agent.learn(name, where)

    def post(self, write: Write, now_ns: int) -> int:
        handle = self.modelled.post(write, now_ns)
        self._waiting[handle] = write
        return handle

    def state(self, handle: int) -> HandleState:
        if handle in self._moving:
            return HandleState.IN_PROGRESS
        return HandleState.ERROR if handle in self._failed else self.modelled.state(handle)

    def release(self, handle: int) -> None:
        if handle in self._waiting and self.modelled.state(handle) is HandleState.ERROR:
            del self._waiting[handle]
        elif handle in self._waiting or handle in self._moving:
            self._released.add(handle)
        self._failed.discard(handle)
        self.modelled.release(handle)

    def next_event_at(self) -> int | None:
        times = (self.modelled.next_event_at(), self._agent.ended_at())
        return min((at for at in times if at is not None), default=None)

    def run(self, now_ns: int) -> list[Write]:
        for write in self.modelled.run(now_ns):
            handle = next(number for number, posted in self._waiting.items() if posted is write)
            del self._waiting[handle]
            self._moving.add(handle)
            self._agent.start(self._move_of(handle, self._names.get(write.peer, ""), write))
        for ended in self._agent.take_ended():
            self._moving.discard(ended.number)
            if ended.reason:
                log.warning("transfer %d: %s", ended.number, ended.reason)
            if ended.number in self._released:
                self._released.discard(ended.number)
            elif ended.reason:
                self._failed.add(ended.number)
        return []

    def lose_peer(self, peer: str, now_ns: int) -> None:
        """Bytes on their way fail at once; what the model holds fails when the model says so."""
        self.modelled.lose_peer(peer, now_ns)
        name = self._names.pop(peer, None)
        if name is not None:
            self._agent.forget(name)

    def find_peer(self, peer: str) -> None:
        self.modelled.find_peer(peer)

    def abandon(self, room: int, now_ns: int) -> None:
        self.modelled.abandon(room, now_ns)
