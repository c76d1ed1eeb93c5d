"""What every KV connector of an engine has: blocks held for others, blocks on their way here, counts, and lines for the log.

The connector never touches a sequence. It returns outcomes, and the engine applies them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import S
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.holds import HoldBook
from windtunnel.core.vllm.connector.loads import Fatal, Freed, Load, Loaded, LoadFailed, Outcome, Overwrote
from windtunnel.core.vllm.connector.peers import PeerBook
from windtunnel.core.vllm.connector.seam import Ask, Handshake, Report

MAX_WARNINGS = 64
MAX_OBSERVATIONS = 4096


class Kept(NamedTuple):
    """A finished request's blocks are the connector's from here on."""

    params: dict[str, Any] | None
    """What the answer says under `kv_transfer_params`."""


class Connector(ABC):
    """Owned by one engine. All times are the engine's."""

    series: ClassVar[str]
    """What its metrics begin with."""
    counted: ClassVar[tuple[str, ...]]
    """The names of its counters."""

    def __init__(self, config: KvTransferConfig, pool: BlockPool, *, block_size: int, num_blocks: int) -> None:
        self.config = config
        self.block_size = block_size
        self.counters: Counter[str] = Counter(dict.fromkeys(self.counted, 0))
        self.observations: list[tuple[str, float]] = []
        self.warnings: list[str] = []
        self.holds = HoldBook(pool, ordered=config.ordered_reaper)
        self.loads: dict[int, Load] = {}
        self._pool = pool
        self._num_blocks = num_blocks
        self.peers = PeerBook(config)
        self.numbers = count(1)

    @property
    def handshake(self) -> Handshake:
        config = self.config
        return Handshake(config.engine_id, config.compatibility_hash, self.block_size, self._num_blocks, config.tp_size)

    @property
    def block_bytes(self) -> int:
        """All ranks and layers together."""
        return self.block_size * self.config.kv_bytes_per_token

    # The life of a request

    @abstractmethod
    def arrived(self, request: EngineRequest, now_ns: int) -> None:
        """A request with parameters enters the engine."""

    @abstractmethod
    def wants(self, request_id: str) -> bool:
        """Whether this request's KV is still to come from elsewhere."""

    def forbids(self, request: EngineRequest) -> bool:
        """Whether scheduling this request trips an assertion."""
        return False

    @abstractmethod
    def external_tokens(self, request: EngineRequest, local_tokens: int) -> int:
        """How many tokens behind `local_tokens` would be loaded."""

    @abstractmethod
    def skip(self, request_id: str, now_ns: int) -> None:
        """Everything is here already, or not worth a transfer."""

    @abstractmethod
    def load(self, request: EngineRequest, blocks: Sequence[int], first: int, tokens: int, now_ns: int) -> Load:
        """Blocks are allocated: what stands in them from place `first` on, up to `tokens` tokens, is to be fetched."""

    @abstractmethod
    def start(self, load: Load, now_ns: int) -> list[Outcome]:
        """Ask for it."""

    @abstractmethod
    def finishing(
        self, request: EngineRequest, reason: FinishReason, blocks: list[int], tokens: int, cached_tokens: int, now_ns: int
    ) -> Kept | None:
        """A request finishes and `blocks` are its own; None leaves them to the engine."""

    @abstractmethod
    def ended(self, request_id: str, now_ns: int) -> None:
        """A request is over, in whatever way."""

    @abstractmethod
    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        """See `KvEngine.release_remote`."""

    # What comes in, and time

    @abstractmethod
    def receive(self, report: Report, now_ns: int) -> list[Outcome]: ...

    @abstractmethod
    def next_event_at(self) -> int | None: ...

    @abstractmethod
    def run(self, now_ns: int) -> list[Outcome]:
        """Everything that is due."""

    def clear(self) -> list[Outcome]:
        """The engine has died: everything is forgotten, nobody is told."""
        freed = [
            Freed(hold.request_id, hold.blocks) for hold in [self.holds.take(one.request_id) for one in list(self.holds.all())]
        ]
        freed += [Freed(load.request_id, load.blocks) for load in self.loads.values() if load.orphaned and load.freed is None]
        self.loads.clear()
        self.peers.clear()
        return list(freed)

    # Loads

    def orphan(self, load: Load) -> bool:
        """Its request has gone. True if the blocks are the load's from here on, False if they are to be freed at once."""
        load.orphaned = True
        if self.config.free_on_abort:
            load.freed = self._pool.watch(load.moving)
        return load.freed is None

    def _arrived_load(self, load: Load, foreign: Sequence[int]) -> list[Outcome]:
        if load.orphaned:
            return self._orphan_ended(load, landed=True)
        return [Loaded(load, tuple(load.first + at for at in foreign))]

    def _lost_load(self, load: Load, reason: str, failed: Sequence[int] | None) -> list[Outcome]:
        """`failed`: places in what moves that have not arrived; None: all."""
        if load.orphaned:
            return self._orphan_ended(load, landed=False)
        missing = load.first if failed is None else load.first + min(failed, default=len(load.moving))
        return [LoadFailed(load, reason, missing)]

    def _orphan_ended(self, load: Load, *, landed: bool) -> list[Outcome]:
        if load.freed is not None:
            generations = self._pool.generations
            hit = [block for block, at in zip(load.moving, load.freed, strict=True) if generations[block] != at]
            return [Overwrote(hit)] if hit and landed else []
        if self.config.die_of_late_load:
            return [Freed(load.request_id, load.blocks), Fatal(load.request_id)]
        if self.config.forget_on_abort:
            self.loads[load.number] = load
            return []
        return [Freed(load.request_id, load.blocks)]

    def _load_of(self, request_id: str) -> Load | None:
        return next((load for load in self.loads.values() if load.request_id == request_id), None)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # Saying and counting

    def take_outgoing(self) -> list[Ask]:
        taken, self.peers.outgoing = self.peers.outgoing, []
        return taken

    def observe(self, size_bytes: int, descriptors: int, took_ns: int) -> None:
        """Posting takes no time here, so `nixl_post_time_seconds` is not observed."""
        if len(self.observations) < MAX_OBSERVATIONS:
            self.observations += [
                (f"{self.series}_xfer_time_seconds", took_ns / S),
                (f"{self.series}_bytes_transferred", size_bytes),
                (f"{self.series}_num_descriptors", descriptors),
            ]

    def warn(self, text: str) -> None:
        """One line for the log of whoever drives the engine; of a flood only the first lines."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)

    # Looking in

    @property
    @abstractmethod
    def waiting_to_start(self) -> int:
        """Requests whose KV lies elsewhere and that have not been scheduled yet."""

    def outstanding(self) -> dict[str, int]:
        """What is held for somebody else, or on its way: all 0 when both sides have come to rest."""
        orphans = sum(load.orphaned for load in self.loads.values())
        return {"holds": len(self.holds), "loads": len(self.loads), "orphaned_loads": orphans}

    def owners(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Holds and orphaned loads, with their blocks."""
        for hold in self.holds.all():
            yield f"hold {hold.request_id}", hold.blocks
        for load in self.loads.values():
            if load.orphaned and load.freed is None:
                yield f"load {load.request_id}", load.blocks
