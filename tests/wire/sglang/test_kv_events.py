"""SGLang's KV-event payloads: members, order, hashes and what is one event."""

from hashlib import sha256
from struct import pack
from typing import Any

import msgpack

from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored
from windtunnel.core.sglang.hashing import ROOT
from windtunnel.core.sglang.pages import PagePool
from windtunnel.core.sglang.radix import RadixCache
from windtunnel.wire.sglang.kv_events import SglangEventCodec


def digest(number: int) -> bytes:
    return bytes(7) + bytes([number]) + bytes(24)


def stored(first: int, pages: int, parent: int | None) -> BlockStored:
    hashes = tuple(digest(number) for number in range(first, first + pages))
    tokens = tuple(range(first * 2, (first + pages) * 2))
    return BlockStored(hashes, None if parent is None else digest(parent), tokens, 2, None, (None,) * pages)


def encoded(codec: SglangEventCodec, *events: Any) -> Any:
    stamp, told, rank = msgpack.unpackb(codec.encode(3.5, events, 1))
    assert (stamp, rank) == (3.5, 1)
    return told


def test_maps_leave_out_what_is_null_but_the_required() -> None:
    plain, removed, cleared = encoded(SglangEventCodec(), stored(1, 1, None), BlockRemoved((digest(1),)), AllBlocksCleared())
    assert plain == {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [2, 3], "block_size": 2,
        "lora_id": None, "medium": "GPU",
    }  # fmt: skip
    assert next(iter(plain)) == "type"
    assert removed == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert cleared == {"type": "AllBlocksCleared"}


def test_maps_name_adapter_and_salt() -> None:
    event = stored(1, 1, None)._replace(lora=(0, "sql"), extra_keys=(("tenant", "salt"),))
    (told,) = encoded(SglangEventCodec(), event)
    assert (told["lora_id"], told["lora_name"], told["cache_salt"]) == (None, "sql", "salt")
    (told,) = encoded(SglangEventCodec(), event._replace(extra_keys=(("tenant", ""),)))
    assert "cache_salt" not in told


def test_arrays_have_one_page_each_and_six_members() -> None:
    codec = SglangEventCodec(as_maps=False, coalesced=False)
    told = encoded(codec, stored(1, 2, None), BlockRemoved((digest(1), digest(2))), AllBlocksCleared())
    assert told == [
        ["BlockStored", [1], None, [2, 3], 2, None, "GPU"],
        ["BlockStored", [2], 1, [4, 5], 2, None, "GPU"],
        ["BlockRemoved", [1], "GPU"],
        ["BlockRemoved", [2], "GPU"],
        ["AllBlocksCleared"],
    ]


def test_only_neighbours_that_continue_each_other_are_one() -> None:
    told = encoded(SglangEventCodec(), stored(1, 2, None), stored(3, 1, 2), stored(7, 1, 2), BlockRemoved((digest(7),)),
                   BlockRemoved((digest(3),)), stored(3, 1, 2))  # fmt: skip
    assert [(item["type"], item["block_hashes"]) for item in told] == [
        ("BlockStored", [1, 2, 3]),
        ("BlockStored", [7]),
        ("BlockRemoved", [7, 3]),
        ("BlockStored", [3]),
    ]
    assert told[0]["token_ids"] == [2, 3, 4, 5, 6, 7]


def test_the_hash_is_the_first_sixteen_hex_digits_as_a_signed_integer() -> None:
    pool = PagePool(8, 2)
    tree = RadixCache(pool, collect_events=True)
    tree.insert((5, 6, 7, 8), pool.allocate(2, "me"), "me", tree.root(ROOT))
    (told,) = encoded(SglangEventCodec(), *tree.take_events())
    first = sha256(pack("<2I", 5, 6))
    second = sha256(first.digest() + pack("<2I", 7, 8))
    values = [int(made.hexdigest()[:16], 16) for made in (first, second)]
    assert told["block_hashes"] == [value - (1 << 64) if value >> 63 else value for value in values]
    assert told["parent_block_hash"] is None
