"""Block hashes: h_i = H((h_{i-1} or NONE_HASH, tokens of block i, extra keys or None)), vLLM reference §6.3.

Every algorithm serialises the triple (pickle protocol 5 or canonical CBOR) and digests the bytes. An event carries whole
digests; a publisher that wants integers takes the low 64 bits (`wire_hash`).
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import cbor2
import xxhash

from windtunnel.core.request import EngineRequest

ExtraKey = tuple[str | int, ...]
ShownKeys = tuple[str | tuple[str, int], ...]
Digest = Callable[[Any], bytes]

DEFAULT_SEED = "vllm-none-hash"
"""The sha256 kinds hash it into NONE_HASH while PYTHONHASHSEED is unset; found by matching the vectors of the reference."""

_PICKLE_PROTOCOL = 5


def _sha256(value: Any) -> bytes:
    return sha256(pickle.dumps(value, _PICKLE_PROTOCOL)).digest()


def _sha256_cbor(value: Any) -> bytes:
    return sha256(cbor2.dumps(value, canonical=True)).digest()


def _xxhash(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(pickle.dumps(value, _PICKLE_PROTOCOL))


def _xxhash_cbor(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True))


ALGORITHMS: Mapping[str, Digest] = MappingProxyType(
    {"sha256": _sha256, "sha256_cbor": _sha256_cbor, "xxhash": _xxhash, "xxhash_cbor": _xxhash_cbor}
)


def wire_hash(digest: bytes) -> int:
    """The low 64 bits of a digest read as a big-endian integer: what vLLM publishes by default."""
    return int.from_bytes(digest[-8:], "big")


class BlockHasher:
    """Hashes of one pool's blocks. Immutable, so another thread may hash a long prompt before it is submitted."""

    def __init__(self, algorithm: str, block_size: int, seed: str | None = None) -> None:
        """`seed` stands for PYTHONHASHSEED. Without one the xxhash kinds have no root: vLLM draws one for each process."""
        if algorithm not in ALGORITHMS:
            raise ValueError(f"prefix_caching_hash_algo is {algorithm!r}: must be one of {', '.join(ALGORITHMS)}")
        if seed is None and algorithm.startswith("xxhash"):
            raise ValueError(f"hash_seed is missing: {algorithm} needs one (vLLM draws it for each process)")
        self.block_size = block_size
        self._digest = ALGORITHMS[algorithm]
        self.none_hash = self._digest(DEFAULT_SEED if seed is None else seed)

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], keys: "ExtraKeys", blocks: int) -> None:
        """Append hashes until there are `blocks` of them; `token_ids` starts at the first block not yet hashed."""
        size, digest = self.block_size, self._digest
        parent = hashes[-1] if hashes else self.none_hash
        at = 0
        while len(hashes) < blocks:
            extra = keys.of(len(hashes), size) if keys.media else keys.rest if hashes else keys.first
            parent = digest((parent, tuple(token_ids[at : at + size]), extra))
            hashes.append(parent)
            at += size

    def prompt_hashes(self, request: EngineRequest) -> list[bytes]:
        """Hashes of all full blocks of the prompt."""
        blocks = len(request.prompt_token_ids) // self.block_size
        return next(self.in_parts(request, blocks)) if blocks else []

    def in_parts(self, request: EngineRequest, blocks_at_once: int) -> Iterator[list[bytes]]:
        """The same list, growing: between two parts the caller may do something more urgent."""
        hashes: list[bytes] = []
        prompt, keys, size = request.prompt_token_ids, ExtraKeys(request), self.block_size
        blocks = len(prompt) // size
        while (have := len(hashes)) < blocks:
            upto = min(have + blocks_at_once, blocks)
            self.extend(hashes, prompt[have * size : upto * size], keys, upto)
            yield hashes


class ExtraKeys:
    """What tells equal tokens apart: the adapter in every block, media where they stand, the salt in the first block."""

    __slots__ = ("_lora", "_salt", "first", "media", "rest")

    def __init__(self, request: EngineRequest) -> None:
        # Pickle writes a string object that it meets twice as a reference; vLLM's name and path are always two objects.
        lora = request.lora
        self._lora: tuple[ExtraKey, ...] = () if lora is None else (("lora", lora.name, _copy(lora.path)),)
        self._salt: tuple[ExtraKey, ...] = (("cache_salt", request.cache_salt),) if request.cache_salt else ()
        self.media = request.media
        self.rest = self._lora or None
        """Of every block but the first, where there are no media."""
        self.first = (self._lora + self._salt) or None

    def of(self, block: int, size: int) -> tuple[ExtraKey, ...] | None:
        """Of block `block` of `size` tokens. A medium's key says where in the block it begins (before 0: in an earlier one)."""
        start = block * size
        here = [item for item in self.media if item.offset < start + size and item.offset + item.tokens > start]
        media: tuple[ExtraKey, ...] = tuple(("mm", item.identifier, item.offset - start) for item in here)
        return (*self._lora, *media, *(self._salt if block == 0 else ())) or None

    def shown(self, first_block: int, blocks: int, size: int) -> tuple[ShownKeys | None, ...]:
        """As events show them, one entry for each block: names without tags (golden `kv_events.json`), media as pairs."""
        plain = _shown(self.rest)
        if not self.media:
            told = (plain,) * blocks
            return (_shown(self.first), *told[1:]) if first_block == 0 and blocks else told
        return tuple(_shown(self.of(block, size)) for block in range(first_block, first_block + blocks))


def _shown(keys: tuple[ExtraKey, ...] | None) -> ShownKeys | None:
    if keys is None:
        return None
    return tuple((str(key[1]), int(key[2])) if key[0] == "mm" else str(key[1]) for key in keys)


def _copy(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
