"""What an engine answers: plain values, one `StepOutput` for each step that has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from windtunnel.core.lifecycle import Transition


class FinishReason(Enum):
    """Why the engine ended a sequence (vLLM reference §2.4)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class TokenOutput(NamedTuple):
    """New tokens of one sequence in one step; a finish may come without a token."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id that matched; None for EOS and length."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache; meaningful on the first output of a sequence."""
    error: "EngineError | None" = None
    kv_transfer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EngineError:
    """Why a sequence failed inside the engine, with the HTTP status the real server would give."""

    message: str
    status: int = 500
    kind: str = "InternalServerError"

    @property
    def failed(self) -> bool:
        """Not for an abort without a status code (SGLang reference §5): that one only says why it ended."""
        return self.status >= 400


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not admitted. Nothing of it has happened."""

    reason: str
    """`max_num_queued_reqs`, `max_num_queued_tokens`, `paused`, `dead`, …: the label value of the rejection counter."""
    message: str
    status: int = 503
    kind: str = "Service Unavailable"


class BlockStored(NamedTuple):
    """Consecutive blocks of one sequence that entered the prefix cache. Hashes are full digests (bytes)."""

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora: tuple[int, str] | None
    extra_keys: tuple[tuple[str | tuple[str, int], ...] | None, ...]
    """For each block: adapter, media as (identifier, offset in the block), salt."""
    medium: str = "GPU"
    session_id: str | None = None
    """Of the request that stored them."""


class BlockRemoved(NamedTuple):
    block_hashes: tuple[bytes, ...]
    medium: str = "GPU"


class AllBlocksCleared(NamedTuple):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class StepStats(NamedTuple):
    """The gauges and counter increments that one step delivers. Gauges keep their value until the next step."""

    running: int
    waiting: int
    deferred: int
    kv_usage: float
    """0…1: 1 - free / (blocks - 1)."""
    prefill_tokens: int = 0
    """Prompt tokens computed in this step (recomputed ones included)."""
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()
    external_queries: int = 0
    external_hits: int = 0
    """Prompt tokens looked up and found in a tier behind the pool."""
    disk_hits: int = 0
    """Of these, the tokens found on disk."""
    extra: Mapping[str, float] = {}
    """Flavour-specific gauges (SGLang queues, P/D), by metric stem. `evicted_tokens` is an increment."""


@dataclass(slots=True)
class StepOutput:
    """Everything that became visible at one instant. Owned by whoever called `advance`."""

    at_ns: int
    outputs: list[TokenOutput] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    stats: StepStats | None = None
    """None when no step ran (a refusal, a bare state change): gauges stay as they are."""
    kv_events: Sequence[KvEvent] = ()
