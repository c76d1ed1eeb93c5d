"""The KV-event codec against recorded payloads of a real server, and in the forms that were not recorded."""

import json
from typing import Any

import msgpack
import pytest
from tests.serve.golden import FOLDER, needs_golden

from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from windtunnel.wire.kv_events import BlockIndex, EventCodec, MalformedEvents, decode


def recorded(part: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / "kv_events.json").read_text())[part])


def digest(wire: int) -> bytes:
    """A digest whose low 64 bits are this hash."""
    return bytes(24) + wire.to_bytes(8, "big")


def engine_event(event: dict[str, Any]) -> KvEvent:
    """What an engine would have said to cause this recorded event."""
    if event["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = tuple(digest(value) for value in event["block_hashes"])
    if event["type"] == "BlockRemoved":
        return BlockRemoved(hashes)
    parent = event["parent_block_hash"]
    return BlockStored(
        block_hashes=hashes,
        parent_hash=None if parent is None else digest(parent),
        token_ids=tuple(event["token_ids"]),
        block_size=event["block_size"],
        lora=None if event["lora_id"] is None else (event["lora_id"], event["lora_name"]),
        extra_keys=tuple(None if keys is None else tuple(keys) for keys in event["extra_keys"]),
    )


def test_members_and_order() -> None:
    events = (
        BlockStored((b"\1" * 32,), None, (7, 8), 2, (1, "a"), (("a", "salt"),)),
        BlockRemoved((b"\2" * 32,)),
        AllBlocksCleared(),
    )
    stamp, maps, rank = msgpack.unpackb(EventCodec().encode(3.5, events, 1))
    assert (stamp, rank) == (3.5, 1)
    assert [list(item) for item in maps] == [
        ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
         "group_idx", "kv_cache_spec_kind"],
        ["type", "block_hashes", "medium", "group_idx"],
        ["type"],
    ]  # fmt: skip
    _, arrays, _ = msgpack.unpackb(EventCodec("array").encode(3.5, events, 1))
    assert arrays == [list(item.values()) for item in maps]
    assert arrays[0] == [
        "BlockStored",
        [0x0101010101010101],
        None,
        [7, 8],
        2,
        1,
        "GPU",
        "a",
        [["a", "salt"]],
        0,
        "full_attention",
    ]
    assert decode(EventCodec("array").encode(3.5, events, 1)) == decode(EventCodec().encode(3.5, events, 1))


def test_a_tiers_event_is_vllms_placeholder_without_what_is_not_known() -> None:
    """vLLM 0.33, `OffloadingEventsTracker._placeholder_stored`: members that are null by default are left out of a map."""
    event = BlockStored((b"\1" * 32,), None, (), 0, None, (), "STORAGE")
    _, (told,), _ = msgpack.unpackb(EventCodec().encode(3.5, (event,), 0))
    assert told == {
        "type": "BlockStored",
        "block_hashes": [0x0101010101010101],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
        "group_idx": 0,
    }
    _, (told,), _ = msgpack.unpackb(EventCodec("array").encode(3.5, (event,), 0))
    assert told == ["BlockStored", [0x0101010101010101], None, [], 0, None, "STORAGE", None, None, 0, None]


def test_the_session_that_stored_a_block_is_in_maps() -> None:
    """vLLM 0.33; the array form is older than the member."""
    event = BlockStored((b"\1" * 32,), None, (7, 8), 2, None, (None,), session_id="s")
    _, (told,), _ = msgpack.unpackb(EventCodec().encode(3.5, (event,), 0))
    assert list(told)[-2:] == ["kv_cache_spec_kind", "session_id"] and told["session_id"] == "s"
    _, (told,), _ = msgpack.unpackb(EventCodec("array").encode(3.5, (event,), 0))
    assert told[-1] == "full_attention"


@needs_golden
@pytest.mark.parametrize("part", ["main_cases", "all_blocks_cleared_sample"])
def test_recorded_payloads_come_back_byte_for_byte(part: str) -> None:
    frames = [frame for frame in recorded(part) if "payload_hex" in frame]
    assert frames
    for frame in frames:
        payload = bytes.fromhex(frame["payload_hex"])
        batch = decode(payload)
        assert [batch.timestamp_s, list(batch.events), batch.rank] == frame["decoded"]
        again = EventCodec().encode(batch.timestamp_s, [engine_event(dict(event)) for event in batch.events], batch.rank or 0)
        assert again == payload


@needs_golden
@pytest.mark.parametrize("part", ["main_cases", "eviction_sample", "all_blocks_cleared_sample"])
@pytest.mark.parametrize("form", ["map", "array"])
def test_every_recorded_event_has_the_same_structure(part: str, form: Any) -> None:
    for frame in recorded(part):
        stamp, events, rank = frame["decoded"]
        batch = decode(EventCodec(form).encode(stamp, [engine_event(event) for event in events], rank))
        assert [batch.timestamp_s, list(batch.events), batch.rank] == frame["decoded"]
        assert len(EventCodec().encode(stamp, [engine_event(event) for event in events], rank)) == frame["payload_bytes"]


@pytest.mark.parametrize("form", ["map", "array"])
def test_whole_digests(form: Any) -> None:
    event = BlockStored((b"\1" * 32, b"\2" * 32), b"\3" * 32, (1, 2), 1, None, (None, None))
    (read,) = decode(EventCodec(form, "bytes").encode(0.0, [event], 0)).events
    assert read["block_hashes"] == [b"\1" * 32, b"\2" * 32]
    assert read["parent_block_hash"] == b"\3" * 32


def test_an_index_folds_the_stream() -> None:
    index = BlockIndex()
    stored = BlockStored((digest(1), digest(2)), None, (1, 2), 1, None, (None, None))
    index.apply(decode(EventCodec().encode(0.0, [stored, BlockRemoved((digest(1),))], 0)))
    assert index.hashes == {2}
    index.apply(decode(EventCodec("array").encode(0.0, [AllBlocksCleared()], 0)))
    assert index.hashes == set()


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (msgpack.packb({"ts": 1}), "not an array"),
        (msgpack.packb([1.0]), "not an array"),
        (msgpack.packb([1.0, [{"type": "BlockMoved"}], 0]), "'BlockMoved'"),
        (msgpack.packb([1.0, [[]], 0]), "None"),
        (msgpack.packb([1.0, [["BlockMoved"]], 0]), "'BlockMoved'"),
    ],
)
def test_malformed_payloads_say_what_is_wrong(payload: bytes, says: str) -> None:
    with pytest.raises(MalformedEvents, match=says):
        decode(payload)
