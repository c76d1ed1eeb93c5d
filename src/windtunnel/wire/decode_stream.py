"""Incremental decoding by the tokenizers library, as in vLLM 0.33 (`FastIncrementalDetokenizer`)."""

import tokenizers
from tokenizers.decoders import DecodeStream

_INVALID_PREFIX = "Invalid prefix encountered"


class TokenTexts:
    """Mutable state of one sequence."""

    def __init__(self, inner: tokenizers.Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._inner = inner
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def text(self, token: int) -> str:
        """The text that this token completes; empty within a character.

        A vocabulary with bytes to fall back on decodes a run of bytes as a whole: one that is no character takes back the
        text of the bytes before it, and the library raises a bare Exception. Then decoding begins anew with this token.
        """
        try:
            return self._stream.step(self._inner, token) or ""
        except Exception as error:
            if not str(error).startswith(_INVALID_PREFIX):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return self._stream.step(self._inner, token) or ""
