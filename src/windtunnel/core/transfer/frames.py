"""What decode and prefill say to each other (SGLang reference §4.1), as values. Encoding is the server's business.

`KvChunk` is the data plane: what a write into the decode's memory would leave there, with the notification attached to it.
"""

from typing import NamedTuple

from windtunnel.core.transfer.status import KVPoll


class Aux(NamedTuple):
    """What travels with the last chunk."""

    room: int
    """As an integrity check."""
    first_token: int
    cached_tokens: int


class Metadata(NamedTuple):
    """Decode → prefill, for each room: where to write."""

    room: int
    peer: str
    """ip:port of the decode rank's socket; its writes and answers go there."""
    pages: tuple[int, ...]
    """Destination pages, in order, of the tokens after the decode's own prefix."""
    stamp: int
    """The allocation under which the decode holds them. Each `KvChunk` brings it back."""
    aux_index: int
    required_dst_info_num: int
    """How many of these the prefill rank must have before the room is ready."""
    prefix_tokens: int = 0
    dummy: bool = False


class Abort(NamedTuple):
    """Decode → prefill: nobody wants this room any more."""

    room: int
    peer: str
    generation: int | None = None
    """With deferred release: what the acknowledgement must name."""


class KvChunk(NamedTuple):
    """Prefill → decode, by remote write: pages of one chunk, and the aux data with the last one."""

    room: int
    chunk: int
    is_last: bool
    rank: int
    pages: tuple[int, ...]
    stamp: int
    aux_index: int
    aux: Aux | None = None

    @property
    def notification(self) -> str:
        """The string attached to the write up to 0.5.22."""
        return f"{self.room}_kv_{self.chunk}_{int(self.is_last)}_{self.rank}"


class KvStatus(NamedTuple):
    """Prefill → decode: how a room ended on this prefill rank."""

    room: int
    status: KVPoll
    rank: int
    reason: str = ""


class AbortAck(NamedTuple):
    """Prefill → decode: this rank writes no more into the room."""

    room: int
    rank: int
    generation: int


class RegisterDpRank(NamedTuple):
    """Prefill → its bootstrap server (`POST /register_dp_rank`)."""

    room: int
    dp_rank: int


class TopologyQuery(NamedTuple):
    """Decode → bootstrap server (`GET /route`); the answer comes back as `DecodeWorker.topology`."""

    address: str


class DpRankQuery(NamedTuple):
    """Decode → bootstrap server (`POST /query_dp_ranks`); the answer comes back as `DecodeWorker.dp_ranks`."""

    address: str
    rooms: tuple[int, ...]


Frame = Metadata | Abort | KvChunk | KvStatus | AbortAck
Query = RegisterDpRank | TopologyQuery | DpRankQuery


class Outgoing(NamedTuple):
    """Something to send: from which of the worker's ranks, to whom (ip:port, or a bootstrap address for a `Query`)."""

    rank: int
    to: str
    frame: Frame | Query


class LateWrite(NamedTuple):
    """A write that landed in pages freed since the address was given away (SGLang reference §10, P30)."""

    at_ns: int
    room: int
    prefill_rank: int
    decode_rank: int
    pages: tuple[tuple[int, str], ...]
    """(page, its owner at the time of the write; empty if it was free)."""
