"""Blocks on their way between two engines, as the engine under whose pool they are sees them."""

from collections.abc import Sequence
from typing import NamedTuple

from windtunnel.core.outputs import EngineError
from windtunnel.core.vllm.connector.params import Remote

LOAD_FAILED = EngineError("Internal server error", 500, "InternalServerError")
"""What a client sees of a failed load under the policy `fail` (finish reason `error`)."""


class Load:
    """One request's KV on its way to us. Owned by the connector until it has ended, whatever becomes of the request."""

    __slots__ = (
        "again",
        "asked_ns",
        "blocks",
        "digest",
        "first",
        "freed",
        "number",
        "orphaned",
        "remote",
        "request_id",
        "size_bytes",
        "stop",
        "tokens",
    )

    def __init__(
        self, number: int, request_id: str, remote: Remote, blocks: Sequence[int], places: range, tokens: int, size_bytes: int
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.remote = remote
        self.blocks = list(blocks)
        """All of the request, those from the local cache included."""
        self.first, self.stop = places.start, places.stop
        """The places in `blocks` of what moves: before these the local cache has it, behind them it is computed here."""
        self.tokens = tokens
        """Tokens that are computed when the load is done."""
        self.size_bytes = size_bytes
        self.again = 0
        """Tokens that are loaded and computed here all the same: the prompt's last, where its KV comes along."""
        self.digest = ""
        """Of the prompt, where the other side tells of which prompt its blocks are."""
        self.asked_ns: int | None = None
        """When the move was asked for; None while a handshake is under way."""
        self.orphaned = False
        """The request has gone: the blocks stay until the transfer ends (vLLM #32255)."""
        self.freed: tuple[int, ...] | None = None
        """The generations of the blocks that move, if they were freed all the same."""

    @property
    def moving(self) -> tuple[int, ...]:
        return tuple(self.blocks[self.first : self.stop])


class Loaded(NamedTuple):
    """The load has ended well. `foreign`: places in the request's blocks with somebody else's content."""

    load: Load
    foreign: tuple[int, ...]


class LoadFailed(NamedTuple):
    load: Load
    reason: str
    missing: int
    """The first place in the request's blocks that has not arrived."""


class Freed(NamedTuple):
    """Nobody needs these blocks any more."""

    owner: str
    blocks: Sequence[int]


class Overwrote(NamedTuple):
    """A transfer has written into blocks that had been given to somebody else."""

    blocks: Sequence[int]


class Fatal(NamedTuple):
    """An assertion has failed: the engine dies."""

    owner: str


Outcome = Loaded | LoadFailed | Freed | Overwrote | Fatal
