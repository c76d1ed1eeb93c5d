"""KV events and load records as `SubscribeKvEvents` sends them (smg-grpc-proto 0.4.28): one message for what one step did."""

from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from windtunnel.core.kv.hashing import wire_hash
from windtunnel.core.outputs import BlockRemoved, BlockStored, KvEvent

_SIGN, _MODULUS = 1 << 63, 1 << 64
_FULL_ATTENTION = "full_attention"
_GROUP = 0
_LEVELS = {"GPU": (0, pb.KV_CACHE_TIER_DEVICE), "CPU": (1, pb.KV_CACHE_TIER_HOST), "STORAGE": (2, pb.KV_CACHE_TIER_DISK)}
"""Cache level and tier of a medium."""


def batch(sequence: int, timestamp_s: float, events: Sequence[KvEvent], rank: int, first_id: int) -> pb.KvEventBatch:
    """Events are numbered from `first_id` on."""
    return pb.KvEventBatch(
        sequence_number=sequence,
        timestamp=timestamp_s,
        events=[_event(event, number) for number, event in enumerate(events, start=first_id)],
        dp_rank=rank,
    )


def signed_hash(digest: bytes) -> int:
    """The hash of the ZMQ stream as a signed number of 64 bits."""
    value = wire_hash(digest)
    return value - _MODULUS if value >= _SIGN else value


def _event(event: KvEvent, number: int) -> pb.KvCacheEvent:
    if isinstance(event, BlockStored):
        return pb.KvCacheEvent(event_id=number, stored=_stored(event))
    if isinstance(event, BlockRemoved):
        level, tier = _LEVELS[event.medium]
        removed = pb.KvBlocksRemoved(
            block_hashes=[signed_hash(digest) for digest in event.block_hashes],
            cache_level=level,
            tier=tier,
            medium=event.medium,
            group_idx=_GROUP,
        )
        return pb.KvCacheEvent(event_id=number, removed=removed)
    return pb.KvCacheEvent(event_id=number, cleared=pb.KvCacheCleared())


def _stored(event: BlockStored) -> pb.KvBlocksStored:
    size = event.block_size
    lora_id, lora_name = event.lora or (None, None)
    level, tier = _LEVELS[event.medium]
    blocks = [
        pb.KvBlock(
            block_hash=signed_hash(digest),
            token_ids=event.token_ids[at * size : (at + 1) * size],
            block_size=size,
            lora_id=lora_id,
            cache_level=level,
            extra_keys=[_extra_key(key) for key in (event.extra_keys[at] if event.extra_keys else None) or ()],
        )
        for at, digest in enumerate(event.block_hashes)
    ]
    return pb.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=None if event.parent_hash is None else signed_hash(event.parent_hash),
        tier=tier,
        medium=event.medium,
        group_idx=_GROUP,
        kv_cache_spec_kind=_FULL_ATTENTION if size else None,
        lora_name=lora_name,
    )


def _extra_key(key: str | tuple[str, int]) -> pb.KvBlockExtraKey:
    if isinstance(key, str):
        return pb.KvBlockExtraKey(text=key)
    return pb.KvBlockExtraKey(multimodal=pb.KvMultimodalKey(identifier=key[0], offset=key[1]))


def load_only(sequence: int, timestamp_s: float, rank: int, load: pb.EngineLoad) -> pb.KvEventBatch:
    """A record without events: repeats the last sequence number of its rank, and is admitted to no cursor."""
    told = pb.KvEventBatch(sequence_number=sequence, timestamp=timestamp_s, dp_rank=rank, load=load)
    told.load.load_only = True
    return told
