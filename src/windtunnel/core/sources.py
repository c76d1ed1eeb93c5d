"""What sequences "generate": implementations of `TokenSource`.

Each is a function of position. Internal lists are caches of that function and never change what it returns.
"""

from collections.abc import Sequence
from itertools import chain

from windtunnel.core import oracle

_WORDS_AT_ONCE = 256
_FIRST_WORDS = 7


class OracleSource:
    """The oracle's words as tokens of one vocabulary. Keeps what it has made: about 8 bytes a token."""

    __slots__ = ("_end", "_identity", "_min_tokens", "_natural_words", "_tokens", "_vocabulary", "_words")

    def __init__(
        self, identity: int, vocabulary: Sequence[Sequence[int]], natural_length: int | None, *, min_tokens: int = 0
    ) -> None:
        """`vocabulary`: `Tokenizer.oracle_token_ids`. `natural_length`: words until the end, None without one (`ignore_eos`).

        With `min_tokens` the text goes on, word by word, until there are so many tokens.
        """
        self._identity = identity
        self._vocabulary = vocabulary
        self._natural_words = natural_length
        self._min_tokens = min_tokens
        self._words = 0
        self._tokens: list[int] = []
        self._end: int | None = None

    @property
    def identity(self) -> int:
        return self._identity

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        tokens = self._tokens
        stop = start + count
        while len(tokens) < stop and self._end is None:
            self._more()
        return tokens[start:stop]

    def _more(self) -> None:
        # The first few are cheap to hold. Then sequences that start together refill at different times: no step pays for all.
        spread = _FIRST_WORDS + self._identity % _WORDS_AT_ONCE
        block = {0: _FIRST_WORDS, _FIRST_WORDS: spread}.get(self._words, _WORDS_AT_ONCE)
        if self._natural_words is None:
            self._append(block)
        elif self._words < self._natural_words:
            self._append(min(block, self._natural_words - self._words))
        elif len(self._tokens) < self._min_tokens:
            self._append(1)
        else:
            self._end = len(self._tokens)

    def _append(self, words: int) -> None:
        indices = oracle.word_indices(self._identity, self._words, words)
        self._tokens.extend(chain.from_iterable(map(self._vocabulary.__getitem__, indices)))
        self._words += words


class SequenceSource:
    """Given tokens (a recorded answer, a sentence, a forced answer), once or for ever."""

    __slots__ = ("_length", "_token_ids")

    def __init__(self, token_ids: Sequence[int], *, ignore_eos: bool = False, min_tokens: int = 0) -> None:
        """With `ignore_eos` the tokens repeat for ever, with `min_tokens` until there are so many. No tokens repeat as none."""
        self._token_ids = tuple(token_ids)
        self._length = None if ignore_eos and token_ids else max(len(token_ids), min_tokens if token_ids else 0)

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        stop = start + count if self._length is None else min(start + count, self._length)
        tokens = self._token_ids
        if stop <= len(tokens):
            return tokens[start:stop]
        return [tokens[position % len(tokens)] for position in range(start, stop)]


class EchoSource(SequenceSource):
    """The prompt again."""

    __slots__ = ()

    def __init__(self, prompt_token_ids: Sequence[int], *, ignore_eos: bool = False, min_tokens: int = 0) -> None:
        super().__init__(prompt_token_ids, ignore_eos=ignore_eos, min_tokens=min_tokens)
