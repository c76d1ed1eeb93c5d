"""What a sequence generates when part of its KV was somebody else's: fluent, and wrong (vLLM reference §9.4, entry 42)."""

from collections.abc import Sequence

from windtunnel.core.request import TokenSource

_SHIFT = 4099
"""Tokens further on in the same source: words of the same kind, but not those that the oracle expects there."""


class ForeignSource:
    """As long as the true answer, and made of other words: what the true source would say much later."""

    __slots__ = ("_true",)

    def __init__(self, true: TokenSource) -> None:
        self._true = true

    def token_ids(self, start: int, count: int) -> Sequence[int]:
        length = len(self._true.token_ids(start, count))
        tokens = list(self._true.token_ids(start + _SHIFT, length))
        while len(tokens) < length:
            tokens.append(self._neighbour(start + len(tokens)))
        return tokens

    def _neighbour(self, position: int) -> int:
        """The token beside this one, for a source that ends before the shift."""
        beside = self._true.token_ids(position - 1 if position else 1, 1) or self._true.token_ids(position, 1)
        return beside[0]
