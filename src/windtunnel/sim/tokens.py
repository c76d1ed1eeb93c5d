"""What prompts and answers are made of in the simulated world: token ids without a text behind them, cheap to make."""

from array import array
from collections.abc import Sequence
from random import Random

LOWEST, HIGHEST = 512, 16895
"""Inside the vocabulary of the built-in tokenizer and outside its special tokens and bytes."""

_HIGH_BYTE = bytes(LOWEST // 256 + (code & 63) for code in range(256))
_SIZE = 1 << 16


def random_tokens(draws: Random, count: int) -> tuple[int, ...]:
    """`count` token ids, uniform in LOWEST … HIGHEST."""
    pairs = bytearray(2 * count)
    pairs[0::2] = draws.randbytes(count)
    pairs[1::2] = draws.randbytes(count).translate(_HIGH_BYTE)
    tokens = array("H", bytes(pairs))
    if tokens.itemsize == 2 and _BIG_ENDIAN:
        tokens.byteswap()
    return tuple(tokens)


_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"
_TABLE = random_tokens(Random("windtunnel answers"), _SIZE) * 2


class Answer:
    """A `TokenSource` without an end: a slice of one table of random tokens, told apart by where it starts."""

    __slots__ = ("_offset",)

    def __init__(self, number: int) -> None:
        self._offset = number * 40_503 % _SIZE

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        first = (self._offset + start) % _SIZE
        if count <= _SIZE:
            return _TABLE[first : first + count]
        return tuple(_TABLE[(first + at) % _SIZE] for at in range(count))
