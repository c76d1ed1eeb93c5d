"""KV-cache events in SGLang's form: msgpack batches `[timestamp, [event…], attention-DP rank]` (SGLang reference §8.2).

An event is a map with key `type`, its optional members left out when they are null (from 0.5.20), or an array headed by the
type. A page's hash is the first 16 hex digits of its digest as a signed integer; the first page of a prompt has no parent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import msgpack

from windtunnel.core.outputs import BlockRemoved, BlockStored, KvEvent
from windtunnel.core.sglang.hashing import wire_hash

MEMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
)
"""The members of each event after its type, in wire order. Maps have `cache_salt` and `lora_name` too, where there is one."""


@dataclass(frozen=True, slots=True)
class SglangEventCodec:
    """From an engine's events to payloads. Implements `windtunnel.wire.kv_events.Codec`."""

    as_maps: bool = True
    coalesced: bool = True
    """Adjacent events of one kind are one, if they continue each other; otherwise each event names one page."""
    topic_in_replay: ClassVar[bool] = False

    def encode(self, timestamp_s: float, events: Sequence[KvEvent], rank: int) -> bytes:
        """One batch: everything that happened to the cache since the last report."""
        shape = _as_map if self.as_maps else _as_array
        told = coalesce(events) if self.coalesced else by_page(events)
        packed: bytes = msgpack.packb((float(timestamp_s), [shape(event) for event in told], rank), use_bin_type=True)
        return packed


def by_page(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """The same events, one page in each."""
    for event in events:
        if isinstance(event, BlockStored):
            yield from _pages(event)
        elif isinstance(event, BlockRemoved):
            yield from (event._replace(block_hashes=(digest,)) for digest in event.block_hashes)
        else:
            yield event


def _pages(event: BlockStored) -> Iterator[BlockStored]:
    size, parent = event.block_size, event.parent_hash
    for at, digest in enumerate(event.block_hashes):
        tokens = event.token_ids[at * size : (at + 1) * size]
        keys = event.extra_keys[at : at + 1]
        yield event._replace(block_hashes=(digest,), parent_hash=parent, token_ids=tokens, extra_keys=keys)
        parent = digest


def coalesce(events: Iterable[KvEvent]) -> list[KvEvent]:
    """Neighbours as one event: removals from one medium, and pages each of which follows the one before."""
    runs: list[list[KvEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _continues(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved):
        return last.medium == event.medium
    if not isinstance(last, BlockStored) or not isinstance(event, BlockStored):
        return False
    alike = (last.medium, last.lora, last.block_size, last.session_id, last.extra_keys[:1])
    return event.parent_hash == last.block_hashes[-1] and alike == (
        event.medium,
        event.lora,
        event.block_size,
        event.session_id,
        event.extra_keys[:1],
    )


def _joined(run: Sequence[Any]) -> KvEvent:
    first: BlockStored | BlockRemoved = run[0]
    hashes = tuple(digest for event in run for digest in event.block_hashes)
    if isinstance(first, BlockRemoved):
        return first._replace(block_hashes=hashes)
    tokens = tuple(token for event in run for token in event.token_ids)
    keys = tuple(key for event in run for key in event.extra_keys)
    return first._replace(block_hashes=hashes, token_ids=tokens, extra_keys=keys)


def _values(event: KvEvent) -> tuple[Any, ...]:
    """The values of MEMBERS[type], in that order. SGLang names an adapter, and never numbers it."""
    if isinstance(event, BlockStored):
        parent = None if event.parent_hash is None else wire_hash(event.parent_hash)
        hashes = [wire_hash(digest) for digest in event.block_hashes]
        return hashes, parent, event.token_ids, event.block_size, None, event.medium
    if isinstance(event, BlockRemoved):
        return [wire_hash(digest) for digest in event.block_hashes], event.medium
    return ()


def _as_map(event: KvEvent) -> dict[str, Any]:
    tag = type(event).__name__
    shown = {"type": tag, **dict(zip(MEMBERS[tag], _values(event), strict=True))}
    if isinstance(event, BlockStored):
        _extra_key, salt = (event.extra_keys[0] if event.extra_keys else None) or ("", "")
        shown |= {"cache_salt": salt} if salt else {}
        shown |= {"session_id": event.session_id} if event.session_id else {}
        shown |= {"lora_name": event.lora[1]} if event.lora else {}
    return shown


def _as_array(event: KvEvent) -> list[Any]:
    return [type(event).__name__, *_values(event)]
