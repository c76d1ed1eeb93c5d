"""One NIXL agent in a thread of its own: the event loop hands it work and hears of results, and never waits for it.

Without NIXL's progress thread, which keeps a core busy, nothing moves unless somebody looks: this thread does, often while
there is something to see. A write has ended when its owner has checked the bytes and sent a receipt.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from windtunnel.serve.clock import now_ns
from windtunnel.serve.nixl import library
from windtunnel.serve.nixl.memory import BlockMemory
from windtunnel.wire.real_bytes import MemoryMap, MessageError, Notice, Receipt, decode, encode

log = logging.getLogger("windtunnel.serve")

MOVES_LIMIT = 65536
"""Moves that are open, and results that nobody has fetched."""
_PEERS_LIMIT = 4096
_BUSY_S = 0.001
_IDLE_S = 0.02
_STAYS_BUSY_S = 2.0
_CLOSE_S = 5.0
GONE = "the peer has gone"


class Move(NamedTuple):
    """Blocks to write to a peer or to read from it."""

    number: int
    peer: str
    """The name of its agent."""
    operation: str
    """`WRITE` or `READ`."""
    owner: str
    """Whose content the blocks have where they come from."""
    blocks: tuple[int, ...]
    """Ours: read into, or (for a write) not looked at."""
    remote_blocks: tuple[int, ...]
    message: tuple[bytes, ...] = ()


class Ended(NamedTuple):
    number: int
    at_ns: int
    reason: str
    """Empty: the bytes are there."""
    corrupt: tuple[int, ...] = ()
    """Places of a read whose bytes are not those that were to come."""


class Arrival(NamedTuple):
    """A peer has written into our memory."""

    message: tuple[bytes, ...]
    corrupt: tuple[int, ...]


class KvAgent:
    """Methods are for the owner's thread, except those that say otherwise. `close` in the end."""

    def __init__(self, name: str, memory: BlockMemory) -> None:
        """Takes half a second. Raises ValueError where NIXL cannot be used."""
        nixl = library.load()
        self._errors = library.errors()
        try:
            self._nixl = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
            regions = [(memory.source_address, memory.source.nbytes, 0, ""), (memory.sink_address, memory.sink.nbytes, 0, "")]
            self._nixl.register_memory(regions, "DRAM")
            self._metadata: bytes = self._nixl.get_agent_metadata()
        except self._errors as error:
            raise ValueError(f"the transfer backend nixl cannot make an agent: {error}") from error
        self.name = name
        self.memory = memory
        self.wake: Callable[[], None] = lambda: None
        """Called from the agent's thread when there is something to take."""
        self.moved_bytes = self.moves = self.corrupt_blocks = self.malformed = 0
        self._work: deque[Callable[[], None]] = deque()
        self._ended: deque[Ended] = deque()
        self._arrivals: deque[Arrival] = deque()
        self._peers: dict[str, MemoryMap | None] = {}
        self._open: dict[int, tuple[Move, Any]] = {}
        self._unreceipted: dict[int, Move] = {}
        self._early: dict[int, Receipt] = {}
        """Receipts for writes that NIXL has still to call done."""
        self._joined: dict[bytes, str] = {}
        """Names of agents, by their metadata."""
        self._nudge = threading.Event()
        self._closing = False
        self._busy_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._thread.start()

    @property
    def map(self) -> MemoryMap:
        memory = self.memory
        return MemoryMap(self._metadata, memory.source_address, memory.sink_address, memory.block_bytes, memory.blocks)

    def learn(self, peer: str, where: MemoryMap) -> None:
        """Before the first move to or from this peer."""
        self._do(lambda: self._add_peer(peer, where))

    def forget(self, peer: str) -> None:
        """Its process is gone: what is open with it fails."""
        self._do(lambda: self._lose(peer))

    def start(self, move: Move) -> None:
        self._do(lambda: self._start(move))

    def expect(self) -> None:
        """Somebody is about to write to us: look often."""
        self._do(lambda: None)

    def ended_at(self) -> int | None:
        """When the first move ended that nobody has taken."""
        return self._ended[0].at_ns if self._ended else None

    def take_ended(self) -> list[Ended]:
        return _drain(self._ended)

    def take_arrivals(self) -> list[Arrival]:
        return _drain(self._arrivals)

    def counters(self) -> dict[str, int]:
        return {
            "moves": self.moves,
            "bytes": self.moved_bytes,
            "open": len(self._open) + len(self._unreceipted),
            "corrupt_blocks": self.corrupt_blocks,
            "malformed_messages": self.malformed,
        }

    def close(self) -> None:
        self._closing = True
        self._nudge.set()
        self._thread.join(_CLOSE_S)

    def _do(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._nudge.set()

    # The thread

    def _run(self) -> None:
        while not self._closing:
            seen = self._turn()
            at_s = time.monotonic()
            if seen or self._open or self._unreceipted:
                self._busy_until_s = at_s + _STAYS_BUSY_S
            self._nudge.wait(_BUSY_S if at_s < self._busy_until_s else _IDLE_S)
            self._nudge.clear()
        for _move, handle in self._open.values():
            with suppress(*self._errors):
                self._nixl.release_xfer_handle(handle)
        del self._nixl

    def _turn(self) -> bool:
        """True: something happened."""
        before = len(self._ended) + len(self._arrivals)
        worked = bool(self._work)
        while self._work:
            self._work.popleft()()
        self._look()
        worked = self._hear() or worked
        if len(self._ended) + len(self._arrivals) > before:
            self.wake()
        return worked

    def _add_peer(self, peer: str, where: MemoryMap) -> None:
        if where.block_bytes != self.memory.block_bytes:
            log.warning(
                "%s has %d bytes a block, we have %d: nothing is moved", peer, where.block_bytes, self.memory.block_bytes
            )
            return
        name = self._join(where.agent)
        if name == peer:
            self._peers[peer] = where
        elif name:
            log.warning("an agent calls itself %s, its server %s: nothing is moved", name, peer)

    def _join(self, metadata: bytes) -> str:
        """The agent's name, or empty."""
        known = self._joined.get(metadata)
        if known is not None:
            return known
        try:
            joined = self._nixl.add_remote_agent(metadata)
        except self._errors as error:
            log.warning("an agent's metadata is refused: %s", error)
            return ""
        name = joined.decode() if isinstance(joined, bytes) else str(joined)
        self._joined[metadata] = name
        self._peers.setdefault(name, None)
        if len(self._peers) > _PEERS_LIMIT:
            self._lose(next(iter(self._peers)))
        return name

    def _lose(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._joined = {metadata: name for metadata, name in self._joined.items() if name != peer}
        for move in [move for move, _ in self._open.values() if move.peer == peer]:
            self._close_handle(move.number)
            self._end(move, GONE)
        for move in [move for move in self._unreceipted.values() if move.peer == peer]:
            del self._unreceipted[move.number]
            self._end(move, GONE)
        with suppress(*self._errors):
            self._nixl.remove_remote_agent(peer)

    def _start(self, move: Move) -> None:
        where = self._peers.get(move.peer)
        if where is None or not self._fits(move, where):
            self._end(move, GONE if where is None else "the blocks are not in the peer's memory")
            return
        try:
            if move.remote_blocks:
                self._open[move.number] = (move, self._handle(move, where))
                self._nixl.transfer(self._open[move.number][1])
            elif move.operation == "WRITE":
                self._unreceipted[move.number] = move
                self._nixl.send_notif(move.peer, self._notice(move))
            else:
                self._end(move, "")
        except self._errors as error:
            self._failed(move, error)

    def _fits(self, move: Move, where: MemoryMap) -> bool:
        if len(self._open) + len(self._unreceipted) >= MOVES_LIMIT:
            return False
        if move.operation == "READ":
            return self.memory.has(move.blocks) and len(move.blocks) == len(move.remote_blocks)
        return not move.remote_blocks or (min(move.remote_blocks) >= 0 and max(move.remote_blocks) < where.blocks)

    def _notice(self, move: Move) -> bytes:
        return encode(Notice(move.number, self._metadata, move.owner, move.remote_blocks, move.message))

    def _handle(self, move: Move, where: MemoryMap) -> Any:
        memory = self.memory
        slots = memory.slots_of(move.owner, move.remote_blocks)
        if move.operation == "WRITE":
            ours = self._places(memory.source_address, slots)
            theirs = self._places(where.sink_address, move.remote_blocks)
            told = self._notice(move)
        else:
            ours = self._places(memory.sink_address, move.blocks)
            theirs = self._places(where.source_address, slots)
            told = b""
        return self._nixl.initialize_xfer(move.operation, ours, theirs, move.peer, told)

    def _places(self, base: int, blocks: Sequence[int]) -> Any:
        size = self.memory.block_bytes
        rows = np.zeros((len(blocks), 3), dtype=np.uint64)
        rows[:, 0] = base + np.asarray(blocks, dtype=np.int64) * size
        rows[:, 1] = size
        return self._nixl.get_xfer_descs(rows, "DRAM")

    def _look(self) -> None:
        """At the moves that are open."""
        for number, (move, handle) in list(self._open.items()):
            if number not in self._open:
                continue
            try:
                state = self._nixl.check_xfer_state(handle)
            except self._errors as error:
                self._failed(move, error)
                continue
            if state == "DONE":
                self._landed(move)
            elif state == "ERR":
                self._failed(move, "NIXL reports ERR")

    def _landed(self, move: Move) -> None:
        self._close_handle(move.number)
        self.moves += 1
        self.moved_bytes += len(move.remote_blocks) * self.memory.block_bytes
        if move.operation == "WRITE":
            self._unreceipted[move.number] = move
            receipt = self._early.pop(move.number, None)
            if receipt is not None:
                self._receipted(receipt)
            return
        corrupt = self.memory.differing(move.owner, move.remote_blocks, move.blocks)
        self.corrupt_blocks += len(corrupt)
        self._end(move, _differ(len(corrupt)) if corrupt else "", corrupt)

    def _failed(self, move: Move, error: object) -> None:
        """NIXL's word for one move. A peer that has gone fails all that is open with it."""
        self._close_handle(move.number)
        self._unreceipted.pop(move.number, None)
        gone = type(error).__name__ == "nixlRemoteDisconnectError"
        self._end(move, GONE if gone else f"NIXL: {error}")
        if gone:
            self._lose(move.peer)

    def _close_handle(self, number: int) -> None:
        _move, handle = self._open.pop(number, (None, None))
        if handle is not None:
            with suppress(*self._errors):
                self._nixl.release_xfer_handle(handle)

    def _end(self, move: Move, reason: str, corrupt: tuple[int, ...] = ()) -> None:
        self._early.pop(move.number, None)
        self._ended.append(Ended(move.number, now_ns(), reason, corrupt))

    def _hear(self) -> bool:
        try:
            heard: dict[Any, list[bytes]] = self._nixl.get_new_notifs()
        except self._errors as error:
            log.warning("NIXL's notifications cannot be read: %s", error)
            return False
        for texts in heard.values():
            for text in texts:
                try:
                    self._told(decode(text))
                except MessageError as error:
                    self.malformed += 1
                    log.warning("%s", error)
        return bool(heard)

    def _told(self, message: Notice | Receipt) -> None:
        if isinstance(message, Notice):
            self._check(message)
            return
        if message.number in self._open:
            self._early[message.number] = message
        else:
            self._receipted(message)

    def _receipted(self, receipt: Receipt) -> None:
        move = self._unreceipted.pop(receipt.number, None)
        if move is not None:
            self._end(move, _differ(receipt.corrupt_blocks) if receipt.corrupt_blocks else "")

    def _check(self, notice: Notice) -> None:
        if not self.memory.has(notice.blocks):
            raise MessageError(f"a notice names blocks that do not exist here: there are {self.memory.blocks}")
        corrupt = self.memory.differing(notice.owner, notice.blocks, notice.blocks)
        self.corrupt_blocks += len(corrupt)
        self._arrivals.append(Arrival(notice.message, corrupt))
        writer = self._join(notice.writer)
        with suppress(*self._errors):
            self._nixl.send_notif(writer, encode(Receipt(notice.number, len(corrupt))))


def _differ(count: int) -> str:
    return f"the bytes of {count} blocks are not those that were sent"


def _drain(found: deque[Any]) -> list[Any]:
    return [found.popleft() for _ in range(len(found))]
