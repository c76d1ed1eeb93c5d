"""Finding token ids behind recorded text: a byte-level vocabulary, known boundaries, sometimes a known count."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from windtunnel.core.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Text between two known token boundaries. `single`: one token, where the vocabulary has it."""

    text: str
    single: bool


class Vocabulary:
    """Token ids by their text in the byte-level alphabet. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {tokenizer.token_string(token): token for token in reversed(range(tokenizer.vocab_size))}
        self._longest = max(len(text) for text in self._ids)

    def tokens(self, pieces: Sequence[Piece], count: int | None) -> list[int]:
        """Token ids that spell the pieces; exactly `count` of them where that is possible."""
        ids = [self._piece(piece) for piece in pieces]
        total = sum(map(len, ids))
        if count is None or total == count:
            return [token for part in ids for token in part]
        return self._adjusted(pieces, ids, count - total)

    def _piece(self, piece: Piece) -> list[int]:
        single = self._ids.get(_alphabet(piece.text)) if piece.single else None
        return self._tokenizer.encode(piece.text, add_special_tokens=False) if single is None else [single]

    def _adjusted(self, pieces: Sequence[Piece], ids: list[list[int]], missing: int) -> list[int]:
        for at, piece in enumerate(pieces):
            if missing and not piece.single:
                spelled = self.exactly(piece.text, len(ids[at]) + missing)
                missing = 0 if spelled is not None else missing
                ids[at] = ids[at] if spelled is None else spelled
        return [token for part in ids for token in part]

    def exactly(self, text: str, count: int) -> list[int] | None:
        """`count` tokens that spell `text`, long ones first; None when there is no such spelling."""
        spelled = _alphabet(text)
        feasible = self._feasible(spelled)
        if count < 0 or not feasible[0] >> count & 1:
            return None
        out, at = [], 0
        while at < len(spelled):
            count -= 1
            token, at = next(edge for edge in self._edges(spelled, at) if feasible[edge[1]] >> count & 1)
            out.append(token)
        return out

    def _feasible(self, spelled: str) -> list[int]:
        """For each position a bit set of the token counts with which the rest can be spelled."""
        feasible = [0] * len(spelled) + [1]
        for at in range(len(spelled) - 1, -1, -1):
            for _token, end in self._edges(spelled, at):
                feasible[at] |= feasible[end] << 1
        return feasible

    def _edges(self, spelled: str, at: int) -> list[tuple[int, int]]:
        ends = range(min(at + self._longest, len(spelled)), at, -1)
        return [(self._ids[spelled[at:end]], end) for end in ends if spelled[at:end] in self._ids]


@lru_cache(maxsize=1)
def _byte_letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies (GPT-2): printable Latin-1 as it is, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _alphabet(text: str) -> str:
    letters = _byte_letters()
    return "".join(letters[byte] for byte in text.encode())
