"""The seam between a vLLM engine with a KV connector and the transport that carries what it says: plain values.

The engine *asks* (`Ask`): shake hands, read, write, notify. The transport *reports* (`Report`). One turn of a driver:

    outputs = engine.advance(now_ns)
    for ask in engine.take_outgoing():      # after every call that touched the engine
        transport.perform(ask, now_ns)
    engine.receive(report, now_ns)          # for each thing that arrives, whenever it does; then look at next_event_at again

Rules of the seam:

* Every `AskHandshake` is answered by one `HandshakeDone` or `HandshakeFailed`, every `StartRead` and `StartWrite` by one
  `MoveDone` or `MoveFailed`, however late, also after the request has gone: the blocks stay taken until then.
* `Notify` is best effort: no report when it went out, `NotifyFailed` when it could not.
* Nothing is asked of a peer before its handshake, except the handshake. The engine compares compatibility hashes itself.
* Reports may come in any order and at any time; an unknown number or id is ignored (and counted where vLLM counts it).
* Times are nanoseconds of the caller's clock; the time scale has been applied to the connector's configuration already.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Peer(NamedTuple):
    """Another engine, as `kv_transfer_params` name it. `host` and `port` are those of its side channel."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1


class Handshake(NamedTuple):
    """What an engine's side channel answers about itself: plain values; the agent's metadata is the transport's business."""

    engine_id: str
    compatibility_hash: str
    """Of model, version and layout (reference §7.2)."""
    block_size: int
    num_blocks: int
    tp_size: int = 1


_PULL_BYTES, _BLOCK_BYTES = 256, 36
"""Of CPython's: a tuple and two texts; a number and the place that it has."""

# Notifications: what engines tell one another. `wire.vllm.nixl` has their bytes.


class Consumed(NamedTuple):
    """Decode → prefill, `<request id>:<consumers>`: one of so many readers has what it needs of the prefill's request."""

    request_id: str
    consumers: int = 1


class Heartbeat(NamedTuple):
    """Decode → prefill, `HB:<ids>`: these requests of the prefill are still wanted."""

    request_ids: tuple[str, ...]


class Registration(NamedTuple):
    """Decode → prefill in push mode, `PUSH_REG:<payload>`: where the prefill is to write."""

    request_id: str
    """The decode's own id."""
    remote_request_id: str | None
    """The prefill's id, where the router has told it; otherwise the ids match by what stands before their suffix."""
    decode: Peer
    blocks: tuple[int, ...]
    """The decode's blocks, for the last ones of the prompt."""


class Pushed(NamedTuple):
    """Prefill → decode in push mode: the write into the blocks of the decode's request has landed."""

    request_id: str


class Pull(NamedTuple):
    """One request of a `Pulls`."""

    request_id: str
    """The decode's own id."""
    transfer_id: str
    """What the router has given to both legs."""
    blocks: tuple[int, ...]
    """The decode's blocks, for the last ones of the prompt; none: only let go of the prefill's."""


class Pulls(NamedTuple):
    """Decode → prefill, Mooncake's `MooncakeXferMetadata`: what one step of the decode wants of one prefill."""

    decode: Peer
    """Where to write, and who is to be answered."""
    pulls: tuple[Pull, ...]
    block_bytes: int
    """Of the decode's blocks, all ranks and layers together: the prefill's must be as large."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory while it waits."""
        ids = sum(len(one.request_id) + len(one.transfer_id) for one in self.pulls)
        return ids + _PULL_BYTES * len(self.pulls) + _BLOCK_BYTES * sum(len(one.blocks) for one in self.pulls)


class Pulled(NamedTuple):
    """Prefill → decode, one request of Mooncake's `MooncakeXferResponse`."""

    request_id: str
    """The decode's own id."""
    reason: str | None = None
    """Why not; None: the write has landed."""
    digest: str = ""
    """Of the prompt whose KV was written (`mooncake.pulls.digest_of`): by it a decode sees that the blocks are another's."""
    last: bool = True
    """The last answer to a `Pulls`."""


Notification = Consumed | Heartbeat | Registration | Pushed | Pulls | Pulled


# What the engine asks


class AskHandshake(NamedTuple):
    peer: Peer


class StartRead(NamedTuple):
    """Pull: copy the peer's blocks into ours."""

    number: int
    """Names this move in the report; unique in one engine."""
    request_id: str
    peer: Peer
    remote_request_id: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    """As many as `local_blocks`, in the same order."""
    size_bytes: int


class StartWrite(NamedTuple):
    """Push: copy our blocks into the peer's."""

    number: int
    request_id: str
    peer: Peer
    remote_request_id: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    size_bytes: int


class Notify(NamedTuple):
    peer: Peer
    notification: Notification


Ask = AskHandshake | StartRead | StartWrite | Notify


# What the transport reports


class HandshakeDone(NamedTuple):
    peer: Peer
    """As it was in the `AskHandshake`."""
    answer: Handshake
    """What answered there; another engine id or hash than the expected one is a failure, which the engine finds."""


class HandshakeFailed(NamedTuple):
    peer: Peer
    reason: str


class MoveDone(NamedTuple):
    number: int
    foreign: tuple[int, ...] = ()
    """Places in the move's blocks whose content was not that of the request any more: `KvSource.overwritten` of the side
    that was read, asked when the move lands."""


class MoveFailed(NamedTuple):
    number: int
    reason: str
    failed: tuple[int, ...] | None = None
    """Places in the move's blocks that did not arrive; None: all."""


class Arrived(NamedTuple):
    notification: Notification


class NotifyFailed(NamedTuple):
    peer: Peer
    notification: Notification
    reason: str


Report = HandshakeDone | HandshakeFailed | MoveDone | MoveFailed | Arrived | NotifyFailed


class KvTransport(Protocol):
    """Carries asks out. Owned by the driver of one engine."""

    def perform(self, ask: Ask, now_ns: int) -> None: ...


class KvSource(Protocol):
    """The side of an engine that others read: what a transport needs to answer for it."""

    @property
    def handshake(self) -> Handshake:
        """What the side channel answers."""
        ...

    def overwritten(self, request_id: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Places in `blocks` that have been given to somebody else since this request held them.

        Empty for a request that is held still or of which nothing is known.
        """
        ...


class KvEngine(KvSource, Protocol):
    """What an engine with a connector has beside `windtunnel.core.engine.Engine`."""

    def take_outgoing(self) -> list[Ask]:
        """What to carry out, in order. Empties the list."""
        ...

    def receive(self, report: Report, now_ns: int) -> None:
        """Something came back, or came in."""
        ...

    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        """The front end refuses a request before it reaches the engine: tell its prefill to free (reference §7.2).

        `kv_transfer` is the request's `kv_transfer_params` as it came. False when it names no prefill.
        """
        ...

    def take_observations(self) -> list[tuple[str, float]]:
        """(histogram stem, value) since the last call: `nixl_xfer_time_seconds`, …"""
        ...
