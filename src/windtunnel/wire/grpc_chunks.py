"""The bytes of plain stream chunks, spliced around what differs from one to the next.

Most messages of most streams are a chunk with one token and three counts. In both services these are fields 1 to 4 of it, and
its index comes after them; so a chunk's bytes are its tokens, a constant, two counts, and a constant (smg-grpc-proto 0.4.28).
The tests hold them equal to what protobuf makes of the same values.
"""

from collections.abc import Sequence
from typing import Any

_TOKEN_IDS, _COMPLETION_TOKENS, _CACHED_TOKENS = b"\x0a", b"\x18", b"\x20"
_MORE = 0x80


def varint(value: int) -> bytes:
    """Base 128, least significant group first. `value` is not negative."""
    if value < _MORE:
        return bytes((value,))
    if value < _MORE << 7:
        return bytes((value & 0x7F | _MORE, value >> 7))
    out = bytearray()
    while value >= _MORE:
        out.append(value & 0x7F | _MORE)
        value >>= 7
    out.append(value)
    return bytes(out)


class PlainChunks:
    """Chunks of one choice, as serialised responses. `message` is the class of a chunk, `head` what stands before it."""

    __slots__ = ("_cached_tokens", "_completion_tokens", "_head", "_index", "_prompt", "_tail")

    def __init__(self, message: Any, head: bytes, prompt_tokens: int, index: int) -> None:
        self._head = head
        self._prompt: bytes = message(prompt_tokens=prompt_tokens).SerializeToString()
        self._index: bytes = message(index=index).SerializeToString()
        self._completion_tokens = self._cached_tokens = -1
        self._tail = b""
        """All after the tokens; made anew when a count has changed."""

    def chunk(self, token_ids: Sequence[int], completion_tokens: int, cached_tokens: int) -> bytes:
        """`token_ids` is not empty and `completion_tokens` not 0: protobuf leaves such fields out."""
        if completion_tokens != self._completion_tokens or cached_tokens != self._cached_tokens:
            self._count(completion_tokens, cached_tokens)
        ids = varint(token_ids[0]) if len(token_ids) == 1 else b"".join(map(varint, token_ids))
        body = b"%b%b%b%b" % (_TOKEN_IDS, varint(len(ids)), ids, self._tail)
        return b"%b%b%b" % (self._head, varint(len(body)), body)

    def _count(self, completion_tokens: int, cached_tokens: int) -> None:
        self._completion_tokens, self._cached_tokens = completion_tokens, cached_tokens
        cached = _CACHED_TOKENS + varint(cached_tokens) if cached_tokens else b""
        self._tail = b"%b%b%b%b%b" % (self._prompt, _COMPLETION_TOKENS, varint(completion_tokens), cached, self._index)
