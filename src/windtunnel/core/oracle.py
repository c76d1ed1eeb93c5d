"""The token oracle: whoever knows the prompt knows the answer.

Output word `i` of a request is a pure function of the request's identity and of `i`. The identity is the last marker
`[wt:<hex>]` in the prompt text, so it survives chat templates and routers; without a marker it is a hash of the prompt
tokens. A client that sent the marker can therefore tell loss, duplication, reordering, crossing between requests and
output after an abort, through any number of proxies.

Words, not token ids, are the contract: a server with another tokenizer writes the same text.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b

from windtunnel.core.words import WORDS

_MARKER = re.compile(r"\[wt:([0-9a-f]{1,32})\]")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 7
"""Words out of one 64-bit mix: nine bits each."""
_BITS = 9
_LANES = 64
"""Blocks that are mixed at once."""
_TOKENS_AT_ONCE = 4096
_WORD_MASK = (1 << _BITS) - 1
assert len(WORDS) == 1 << _BITS


def marker(tag: int) -> str:
    """The text to put into a prompt so that its answer is known. `tag` is any non-negative integer below 2^128."""
    return f"[wt:{tag:x}]"


def identity_of_marker(text: str) -> int | None:
    """The 64-bit identity named by the last marker in `text`, or None without one."""
    found = _MARKER.findall(text)
    return identity_of_tag(found[-1]) if found else None


def identity_of_tag(tag_hex: str) -> int:
    return int.from_bytes(blake2b(b"wt:" + tag_hex.lstrip("0").encode(), digest_size=8).digest())


def identity_of_tokens(token_ids: Sequence[int]) -> int:
    """The identity of a prompt without a marker."""
    digest = blake2b(digest_size=8)
    for at in range(0, len(token_ids), _TOKENS_AT_ONCE):
        part = token_ids[at : at + _TOKENS_AT_ONCE]
        digest.update(struct.pack(f"<{len(part)}I", *part))
    return int.from_bytes(digest.digest())


def identity_with_media(identity: int, identifiers: Sequence[str]) -> int:
    """The identity of a prompt whose tokens do not tell its images apart."""
    digest = blake2b(identity.to_bytes(8), digest_size=8)
    for identifier in identifiers:
        digest.update(identifier.encode())
    return int.from_bytes(digest.digest())


def child_identity(identity: int, index: int) -> int:
    """The identity of choice `index` of the same prompt (`n > 1`); choice 0 is the prompt's own."""
    return _mix(identity ^ (index * _GOLDEN & _MASK)) if index else identity


def word_indices(identity: int, start: int, count: int) -> list[int]:
    """Indices into `WORDS` of output words start … start + count - 1.

    Words 7b … 7b + 6 are the lowest nine bits, the next nine bits, … of the splitmix64 output for identity + (b + 1) x golden.
    """
    first = start // _BLOCK
    blocks = (start + count - 1) // _BLOCK + 1 - first
    indices: list[int] = []
    for at in range(0, blocks, _LANES):
        indices += _indices_of_blocks(identity, first + at, min(_LANES, blocks - at))
    skip = start - first * _BLOCK
    return indices[skip : skip + count]


def _indices_of_blocks(identity: int, first: int, blocks: int) -> list[int]:
    """All blocks in one integer, a lane of 128 bits for each: interpreting a bytecode costs more than a long multiplication."""
    lanes = (identity + first * _GOLDEN & _MASK) * _ones(blocks) + _GOLDEN * _numbers(blocks)
    mixed = _mix_lanes(lanes, _MASK * _ones(blocks))
    nine_bits = _WORD_MASK * _ones(blocks)
    spread = 0
    for word in range(_BLOCK):
        spread |= (mixed >> _BITS * word & nine_bits) << 16 * word
    indices = list(struct.unpack(f"<{8 * blocks}H", spread.to_bytes(16 * blocks, "little")))
    del indices[_BLOCK::8]
    return indices


@cache
def _ones(lanes: int) -> int:
    return sum(1 << 128 * lane for lane in range(lanes))


@cache
def _numbers(lanes: int) -> int:
    """1 in the lowest lane, 2 in the next, …"""
    return sum((lane + 1) << 128 * lane for lane in range(lanes))


def _mix_lanes(lanes: int, mask: int) -> int:
    """`_mix` of every lane. Upper halves take what products and shifts leave, until they are masked."""
    lanes &= mask
    lanes = ((lanes ^ lanes >> 30) & mask) * 0xBF58476D1CE4E5B9 & mask
    lanes = ((lanes ^ lanes >> 27) & mask) * 0x94D049BB133111EB & mask
    return (lanes ^ lanes >> 31) & mask


def words(identity: int, start: int, count: int) -> list[str]:
    return [WORDS[index] for index in word_indices(identity, start, count)]


def natural_length(identity: int, low: int, high: int) -> int:
    """Where this request stops by itself: uniform in [low, high], a function of the identity alone."""
    return low + _mix(identity ^ _MASK) % (high - low + 1)


def text(identity: int, count: int) -> str:
    """The first `count` words as a client receives them: each word with one leading space."""
    return "".join(f" {word}" for word in words(identity, 0, count))


def first_difference(identity: int, received: Sequence[str]) -> int | None:
    """The position of the first word that the oracle would not have written there, or None."""
    for position, (have, want) in enumerate(zip(received, _stream(identity), strict=False)):
        if have != want:
            return position
    return None


def _stream(identity: int) -> Iterator[str]:
    start = 0
    while True:
        yield from words(identity, start, 64)
        start += 64


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
