"""Vectors of a pooling model: a pure function of the prompt's tokens, so that equal prompts have equal vectors.

Each token adds to one place of the vector (feature hashing), so texts that share words are closer than texts that do not;
a little noise from all tokens together tells anagrams apart. Unit length.
"""

import base64
import math
import struct
from collections.abc import Sequence
from hashlib import shake_128

_NOISE = 0.05
_MIX, _MASK = 0x9E3779B1, 0xFFFFFFFF


def vector(token_ids: Sequence[int], size: int) -> list[float]:
    """`size` numbers of length 1."""
    digest = shake_128(b"".join(token.to_bytes(8, "little") for token in token_ids)).digest(size)
    values = [(byte - 127.5) / 127.5 * _NOISE for byte in digest]
    for token in token_ids:
        mixed = (token + 1) * _MIX & _MASK
        values[(mixed >> 7) % size] += 1.0 if mixed & 1 << 31 else -1.0
    return unit(values)


def unit(values: Sequence[float]) -> list[float]:
    """The same direction with length 1."""
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of two unit vectors."""
    return sum(a * b for a, b in zip(first, second, strict=True))


def probabilities(token_ids: Sequence[int], labels: int) -> list[float]:
    """Of a classifier's classes; they add up to 1. One class: a sigmoid."""
    logits = [value * 4 for value in vector(token_ids, max(labels, 2))]
    if labels == 1:
        return [1 / (1 + math.exp(-logits[0]))]
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def as_base64(values: Sequence[float]) -> str:
    """Little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
