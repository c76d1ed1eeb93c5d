"""`--kv-transfer-backend nixl`: the blocks are real memory, and NIXL moves their bytes (clients reference §8).

A block's bytes are a digest of the prompt up to its end, over and over. A prefill writes them when it begins to hold blocks,
and wipes a block that somebody else has been given since. So a decode sees in the bytes that it has read whether they are its
prompt's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy

from windtunnel.core.units import US
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.holds import REMEMBERED
from windtunnel.core.vllm.connector.mover import Move, address
from windtunnel.core.vllm.connector.seam import MoveDone, MoveFailed, Peer, StartRead
from windtunnel.serve.nixl import library

DIGEST_BYTES = 32
_POLL_NS = 200 * US
_PROGRESS_S = 0.004
_REMOTE_GONE = "the remote agent has gone"


class Region(NamedTuple):
    """An engine's blocks, as its handshake names them."""

    metadata: bytes
    """Of the NIXL agent; empty without one."""
    address: int = 0
    block_bytes: int = 0


NO_REGION = Region(b"")


def digests(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """One for each block of a prompt, the last one perhaps not full."""
    chain = blake2b(digest_size=DIGEST_BYTES)
    for start in range(0, len(token_ids), block_size):
        chain.update(b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + block_size]))
        yield chain.digest()


class NixlMemory:
    """One engine's blocks and its NIXL agent. Raises ValueError where there is no NIXL, MemoryError for too much memory."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        nixl = library.load()
        self.errors = library.errors()
        self.block_bytes = block_bytes
        self._blocks = numpy.empty((num_blocks, block_bytes), dtype=numpy.uint8)
        self._blocks.fill(0)  # touched here, and not in the first read
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
        self._registered = self.agent.register_memory([(self._blocks.ctypes.data, self._blocks.nbytes, 0, "kv")], "DRAM")

    @property
    def region(self) -> Region:
        return Region(self.agent.get_agent_metadata(), self._blocks.ctypes.data, self.block_bytes)

    def write(self, block: int, digest: bytes) -> None:
        self._blocks[block] = self._pattern(digest)

    def wipe(self, block: int) -> None:
        self._blocks[block] = 0

    def holds(self, block: int, digest: bytes) -> bool:
        return bool((self._blocks[block] == self._pattern(digest)).all())

    def _pattern(self, digest: bytes) -> Any:
        return numpy.resize(numpy.frombuffer(digest, dtype=numpy.uint8), self.block_bytes)

    def descriptors(self, region: Region, blocks: Sequence[int]) -> Any:
        size = region.block_bytes
        return self.agent.get_xfer_descs([(region.address + block * size, size, 0) for block in blocks], "DRAM")

    async def progress(self) -> None:
        """Let a peer's moves go on, for ever. NIXL's own thread would do it too, and take a whole core for that."""
        while True:
            with suppress(*self.errors):
                self.agent.get_new_notifs()
            await asyncio.sleep(_PROGRESS_S)

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)


class HeldBytes:
    """Keeps a prefill's memory in step with its holds. Owned by a connection; `update` after every turn."""

    def __init__(self, engine: ConnectorEngine, memory: NixlMemory) -> None:
        self._engine = engine
        self._memory = memory
        self._held: dict[str, list[int]] = {}
        self._wiped: dict[str, set[int]] = {}
        """Requests that are held no more, and the places that have been wiped."""

    def update(self) -> None:
        holds = self._engine.connector.holds
        for request_id in [one for one in self._held if holds.get(one) is None]:
            self._wiped.setdefault(request_id, set())
        self._wipe()
        for hold in holds.all():
            if hold.request_id not in self._held:
                self._held[hold.request_id] = list(hold.blocks)
                for block, digest in zip(hold.blocks, digests(hold.prompt, self._engine.connector.block_size), strict=False):
                    self._memory.write(block, digest)

    def _wipe(self) -> None:
        while len(self._wiped) > REMEMBERED:
            self._forget(next(iter(self._wiped)))
        for request_id, wiped in list(self._wiped.items()):
            blocks = self._held[request_id]
            for place in set(self._engine.overwritten(request_id, blocks)) - wiped:
                self._memory.wipe(blocks[place])
                wiped.add(place)
            if len(wiped) == len(blocks):
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._wiped[request_id], self._held[request_id]


class _Transfer(NamedTuple):
    move: Move
    handle: Any
    expected: tuple[bytes, ...]
    """Digests of a read's blocks; empty where nobody looks."""


class NixlMover:
    """Moves blocks by NIXL: a `BlockMover` whose reads are checked by their bytes."""

    checks = True

    def __init__(self, engine: ConnectorEngine, memory: NixlMemory) -> None:
        self._engine = engine
        self._memory = memory
        self._remotes: dict[Peer, tuple[str, Region]] = {}
        """The agent's name and its memory."""
        self._transfers: dict[int, _Transfer] = {}
        self._failed: list[MoveFailed] = []
        self._lost: set[str] = set()
        """host:port of side channels whose processes have gone."""
        self._next_ns: int | None = None

    def connect(self, peer: Peer, region: Region) -> None:
        """Raises ValueError for an engine without NIXL, or with blocks of another size."""
        if not region.metadata:
            raise ValueError("the other side moves no real bytes: start it with --kv-transfer-backend nixl, too")
        if region.block_bytes != self._memory.block_bytes:
            raise ValueError(f"the other side's blocks have {region.block_bytes} bytes, ours {self._memory.block_bytes}")
        try:
            name = self._memory.agent.add_remote_agent(region.metadata)
        except self._memory.errors as error:
            raise ValueError(f"the other agent's metadata: {type(error).__name__} {error}") from error
        self._remotes[peer] = (name.decode() if isinstance(name, bytes) else str(name), region)

    def forget(self, peer: Peer) -> None:
        """Its agent too, unless another peer has the same one or a move of it is under way."""
        name, _region = self._remotes.pop(peer)
        moving = any(transfer.move.peer == peer for transfer in self._transfers.values())
        if not moving and all(name != other for other, _ in self._remotes.values()):
            with suppress(*self._memory.errors):
                self._memory.agent.remove_remote_agent(name)

    def find_peer(self, where: str) -> None:
        self._lost.discard(where)

    def lose_peer(self, where: str, now_ns: int) -> None:
        """The connection says so; NIXL may take longer, or leave a move open."""
        self._lost.add(where)
        for number, transfer in list(self._transfers.items()):
            if address(transfer.move.peer) == where:
                del self._transfers[number]
                self._release(transfer.handle)
                self._failed.append(MoveFailed(number, _REMOTE_GONE))
        self._next_ns = now_ns

    def start(self, move: Move, now_ns: int) -> None:
        self._next_ns = now_ns
        if address(move.peer) in self._lost:
            self._failed.append(MoveFailed(move.number, _REMOTE_GONE))
            return
        name, region = self._remotes[move.peer]
        try:
            local = self._memory.descriptors(self._memory.region, move.local_blocks)
            remote = self._memory.descriptors(region, move.remote_blocks)
            kind = "READ" if isinstance(move, StartRead) else "WRITE"
            handle = self._memory.agent.initialize_xfer(kind, local, remote, name)
            self._transfers[move.number] = _Transfer(move, handle, self._expected(move))
            self._memory.agent.transfer(handle)
        except self._memory.errors as error:
            self._transfers.pop(move.number, None)
            self._failed.append(MoveFailed(move.number, f"{type(error).__name__} {error}"))

    def _expected(self, move: Move) -> tuple[bytes, ...]:
        """The last of the prompt's blocks: those before were in the cache."""
        prompt = self._engine.loading_prompt(move.request_id) if isinstance(move, StartRead) else None
        if prompt is None:
            return ()
        return tuple(digests(prompt, self._engine.connector.block_size))[-len(move.local_blocks) :]

    def next_event_at(self) -> int | None:
        return self._next_ns if self._transfers or self._failed else None

    def run(self, now_ns: int, _overwritten: Callable[[Move], Sequence[int]]) -> list[MoveDone | MoveFailed]:
        reports: list[MoveDone | MoveFailed] = list(self._failed)
        self._failed.clear()
        for number, transfer in list(self._transfers.items()):
            state = self._state(transfer.handle)
            if state == "PROC":
                continue
            del self._transfers[number]
            reports.append(MoveDone(number, self._foreign(transfer)) if state == "DONE" else MoveFailed(number, _REMOTE_GONE))
            self._release(transfer.handle)
        self._next_ns = now_ns + _POLL_NS
        return reports

    def _state(self, handle: Any) -> str:
        try:
            return str(self._memory.agent.check_xfer_state(handle))
        except self._memory.errors:
            return "ERR"

    def _release(self, handle: Any) -> None:
        with suppress(*self._memory.errors):
            self._memory.agent.release_xfer_handle(handle)

    def _foreign(self, transfer: _Transfer) -> tuple[int, ...]:
        pairs = zip(transfer.move.local_blocks, transfer.expected, strict=False)
        return tuple(place for place, (block, digest) in enumerate(pairs) if not self._memory.holds(block, digest))
