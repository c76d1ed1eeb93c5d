"""KV-cache events on the wire: msgpack batches `[timestamp, [event…], data-parallel rank]` (vLLM reference §6.2).

An event is a map with key `type` (since vLLM PR 42892; 0.32 and 0.33 send these) or, in older releases and by default in
llm-d-inference-sim, an array headed by the type. Members and their order are data: one table serves both forms. A block hash
is the low 64 bits of the digest as an unsigned integer, or the digest itself (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import msgpack

from windtunnel.core.kv.hashing import wire_hash
from windtunnel.core.outputs import BlockRemoved, BlockStored, KvEvent

EventFormat = Literal["map", "array"]
HashForm = Literal["int", "bytes"]
WireHash = int | bytes

FORMATS: tuple[EventFormat, ...] = ("map", "array")
HASH_FORMS: tuple[HashForm, ...] = ("int", "bytes")
SEQUENCE_BYTES = 8
END_SEQUENCE = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence field of the message that ends a replay."""

MEMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BlockStored": (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
            "group_idx", "kv_cache_spec_kind",
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx"),
        "AllBlocksCleared": (),
    }
)  # fmt: skip
"""The members of each event after its type, in wire order; a shorter array leaves out the last ones."""

_LEFT_OUT = ("extra_keys", "kv_cache_spec_kind")
"""Members whose default is null: a map does not have them then (vLLM 0.33, `omit_defaults`)."""


class MalformedEvents(ValueError):
    """A payload that is no batch of KV events: says what is wrong."""


class Codec(Protocol):
    """What a publisher needs to know of a flavour's wire."""

    @property
    def topic_in_replay(self) -> bool:
        """Whether a replayed batch has the topic before its sequence number, as a published one has."""
        ...

    def encode(self, timestamp_s: float, events: Sequence[KvEvent], rank: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EventCodec:
    """From an engine's events to payloads, as vLLM has them."""

    form: EventFormat = "map"
    hashes: HashForm = "int"
    topic_in_replay: ClassVar[bool] = True

    def encode(self, timestamp_s: float, events: Sequence[KvEvent], rank: int) -> bytes:
        """One batch: everything that one step did to the cache."""
        shape = _as_map if self.form == "map" else _as_array
        hashed: Callable[[bytes], WireHash] = wire_hash if self.hashes == "int" else bytes
        batch = (float(timestamp_s), [shape(event, hashed) for event in events], rank)
        packed: bytes = msgpack.packb(batch, use_bin_type=True)
        return packed


def _values(event: KvEvent, hashed: Callable[[bytes], WireHash]) -> tuple[Any, ...]:
    """The values of MEMBERS[type], in that order. All blocks are of one group, with full attention; a tier's say neither
    their size (0) nor that."""
    if isinstance(event, BlockStored):
        parent = None if event.parent_hash is None else hashed(event.parent_hash)
        lora_id, lora_name = event.lora or (None, None)
        hashes = [hashed(digest) for digest in event.block_hashes]
        lora_and_medium = (lora_id, event.medium, lora_name)
        return (
            hashes,
            parent,
            event.token_ids,
            event.block_size,
            *lora_and_medium,
            event.extra_keys or None,
            0,
            "full_attention" if event.block_size else None,
        )
    if isinstance(event, BlockRemoved):
        return [hashed(digest) for digest in event.block_hashes], event.medium, 0
    return ()


def _as_map(event: KvEvent, hashed: Callable[[bytes], WireHash]) -> dict[str, Any]:
    tag = type(event).__name__
    told = {"type": tag, **dict(zip(MEMBERS[tag], _values(event, hashed), strict=True))}
    if isinstance(event, BlockStored):
        told = {member: value for member, value in told.items() if value is not None or member not in _LEFT_OUT}
        return told | ({"session_id": event.session_id} if event.session_id else {})
    return told


def _as_array(event: KvEvent, hashed: Callable[[bytes], WireHash]) -> list[Any]:
    return [type(event).__name__, *_values(event, hashed)]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A payload, read. Each event is a map with `type` and the members that were sent, whatever the form on the wire."""

    timestamp_s: float
    events: tuple[Mapping[str, Any], ...]
    rank: int | None


def decode(payload: bytes) -> EventBatch:
    """Raises MalformedEvents. Unknown members of a map are kept: newer servers send more."""
    try:
        batch = msgpack.unpackb(payload, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MalformedEvents(f"the payload is not msgpack: {error}") from None
    if not isinstance(batch, list) or not 2 <= len(batch) <= 3 or not isinstance(batch[1], list):
        raise MalformedEvents("the payload is not an array [timestamp, [event…], rank]")
    return EventBatch(batch[0], tuple(_event(item) for item in batch[1]), batch[2] if len(batch) == 3 else None)


def _event(item: Any) -> Mapping[str, Any]:
    tag = item.get("type") if isinstance(item, dict) else item[0] if isinstance(item, list) and item else None
    if not isinstance(tag, str) or tag not in MEMBERS:
        raise MalformedEvents(f"the event's type is {tag!r}: must be one of {', '.join(MEMBERS)}")
    if isinstance(item, dict):
        return item
    return {"type": tag, **dict(zip(MEMBERS[tag], item[1:], strict=False))}


class BlockIndex:
    """What a router learns from the stream: the hashes that are cached (in one medium). Folds batches; owns one set."""

    def __init__(self, medium: str | None = None) -> None:
        self.hashes: set[WireHash] = set()
        self._medium = medium

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if self._medium is not None and event.get("medium", self._medium) != self._medium:
                continue
            match event["type"]:
                case "BlockStored":
                    self.hashes.update(event["block_hashes"])
                case "BlockRemoved":
                    self.hashes.difference_update(event["block_hashes"])
                case _:
                    self.hashes.clear()
