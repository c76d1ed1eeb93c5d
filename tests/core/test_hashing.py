"""Block hashes against the vectors of vLLM reference §6.3 and against recorded events."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.core.rig import request

from windtunnel.core.kv.hashing import ALGORITHMS, BlockHasher, ExtraKeys, wire_hash
from windtunnel.core.request import Lora, MediaItem

GOLDEN = Path(os.environ.get("WINDTUNNEL_GOLDEN") or Path(__file__).parents[3] / "shared" / "golden") / "vllm"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no recordings at {GOLDEN}; set WINDTUNNEL_GOLDEN")
PROMPT = tuple(range(5, 37))


def test_cbor_vectors() -> None:
    hasher = BlockHasher("sha256_cbor", 16)
    assert hasher.none_hash.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    hashes = hasher.prompt_hashes(request("a", PROMPT))
    assert [wire_hash(digest) for digest in hashes] == [1203327304359756253, 15775255058010707589]


def test_cbor_vectors_with_salt() -> None:
    hashes = BlockHasher("sha256_cbor", 16).prompt_hashes(request("a", PROMPT, cache_salt="abc"))
    assert [wire_hash(digest) for digest in hashes] == [3901782209867096523, 13598040633519929917]


def test_pickle_root() -> None:
    assert BlockHasher("sha256", 16).none_hash.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    assert BlockHasher("sha256", 16, "0").none_hash.hex() == "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c"


def recorded_chains() -> Iterator[dict[str, Any]]:
    if not GOLDEN.is_dir():
        return
    for message in json.loads((GOLDEN / "kv_events.json").read_text())["main_cases"]:
        for event in message["decoded"][1]:
            if event["type"] == "BlockStored" and event["parent_block_hash"] is None:
                yield event


def as_request(event: dict[str, Any]) -> Any:
    shown = event["extra_keys"][0] or []
    adapter = Lora(event["lora_name"], "tiny-lora", event["lora_id"]) if event["lora_name"] else None
    salt = next((key for key in shown if key != event["lora_name"]), None)
    return request("recorded", event["token_ids"], lora=adapter, cache_salt=salt)


@needs_golden
def test_recorded_events_of_plain_salted_and_adapted_prompts() -> None:
    kinds = set()
    for event in recorded_chains():
        recorded = as_request(event)
        hashes = BlockHasher("sha256", event["block_size"], "0").prompt_hashes(recorded)
        assert [wire_hash(digest) for digest in hashes] == event["block_hashes"]
        shown = [list(keys) if keys else None for keys in ExtraKeys(recorded).shown(0, len(hashes), event["block_size"])]
        assert shown == event["extra_keys"]
        kinds.add((recorded.lora is not None, recorded.cache_salt is not None))
    assert kinds == {(False, False), (True, False), (False, True)}


def test_a_name_and_path_that_are_one_object_hash_like_two() -> None:
    name = "".join(["tiny", "-lora"])
    one = Lora(name, name, 1)
    other = Lora(name, name.encode().decode(), 1)
    hasher = BlockHasher("sha256", 16)
    assert hasher.prompt_hashes(request("a", PROMPT, lora=one)) == hasher.prompt_hashes(request("a", PROMPT, lora=other))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hash_names_everything_before_it(algorithm: str) -> None:
    hasher = BlockHasher(algorithm, 16, "42")
    plain = hasher.prompt_hashes(request("a", PROMPT))
    variants = [
        request("a", (6, *PROMPT[1:])),
        request("a", PROMPT, cache_salt="s"),
        request("a", PROMPT, lora=Lora("n", "p", 1)),
        request("a", PROMPT, lora=Lora("n", "q", 1)),
    ]
    chains = [plain, *map(hasher.prompt_hashes, variants)]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(chains)
    assert BlockHasher(algorithm, 16, "43").none_hash != hasher.none_hash


def test_hashes_are_extended_without_change() -> None:
    hasher, keys = BlockHasher("sha256", 4), ExtraKeys(request("a"))
    whole: list[bytes] = []
    hasher.extend(whole, PROMPT, keys, 8)
    parts: list[bytes] = []
    for blocks in (3, 3, 7, 8):
        hasher.extend(parts, PROMPT[len(parts) * 4 :], keys, blocks)
    assert parts == whole


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_caching_hash_algo is 'crc'"):
        BlockHasher("crc", 16)


@pytest.mark.parametrize("blocks_at_once", [1, 3, 100])
def test_a_prompt_hashed_in_parts_has_the_same_hashes(blocks_at_once: int) -> None:
    hasher, prompt = BlockHasher("sha256", 4), request("a", 30, cache_salt="s")
    parts = [len(hashes) for hashes in hasher.in_parts(prompt, blocks_at_once)]
    assert parts == [*range(blocks_at_once, 7, blocks_at_once), 7]
    *_, last = hasher.in_parts(prompt, blocks_at_once)
    assert last == hasher.prompt_hashes(prompt)
    assert hasher.prompt_hashes(request("a", 3)) == []


def test_a_medium_is_a_key_of_the_blocks_that_its_tokens_touch() -> None:
    """As vLLM orders them: adapter, media with their offset from the block's start, salt."""
    item = MediaItem("cat", 14, 20)
    prompt = (7,) * 64
    keys = ExtraKeys(request("a", prompt, media=(item, MediaItem("dog", 40, 4)), lora=Lora("x", "/x", 1), cache_salt="s"))
    lora = ("lora", "x", "/x")
    assert keys.of(0, 16) == (lora, ("mm", "cat", 14), ("cache_salt", "s"))
    assert keys.of(1, 16) == (lora, ("mm", "cat", -2))
    assert keys.of(2, 16) == (lora, ("mm", "cat", -18), ("mm", "dog", 8))
    assert keys.of(3, 16) == (lora,)
    assert keys.shown(1, 3, 16) == (("x", ("cat", -2)), ("x", ("cat", -18), ("dog", 8)), ("x",))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_placeholders_of_other_media_hash_apart_from_there_on(algorithm: str) -> None:
    hasher = BlockHasher(algorithm, 16, "1")
    prompt = (7,) * 64
    plain = hasher.prompt_hashes(request("a", prompt))
    cat, dog, later = (hasher.prompt_hashes(request("a", prompt, media=(MediaItem(*item),))) for item in MEDIA)
    assert plain[0] == cat[0] == dog[0] == later[0]
    assert len({plain[1], cat[1], dog[1], later[1]}) == 4
    assert len({plain[3], cat[3], dog[3], later[3]}) == 4
    assert cat == hasher.prompt_hashes(request("b", prompt, media=(MediaItem(*MEDIA[0]),)))


MEDIA = (("cat", 20, 8), ("dog", 20, 8), ("cat", 21, 8))
