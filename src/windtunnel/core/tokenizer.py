"""The seam to tokenizers, and the built-in one.

The built-in tokenizer is fast, needs no files and is reversible: `decode(encode(text)) == text` for every str, lone
surrogates included. English prose costs about one token for three characters. Each oracle word with
its leading space is one token, so an answer that is sent back as text (multi-turn chat) has the same tokens again and
hits the prefix cache.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from windtunnel.core.words import WORDS


class Detokenizer(Protocol):
    """Incremental text of one sequence. Holds back what is not yet a whole character."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add; bytes of an unfinished character are kept."""
        ...

    def flush(self) -> str:
        """What is still held back, as replacement characters; call once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template is told besides the conversation."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """In place of the tokenizer's own."""
    kwargs: Mapping[str, Any] | None = None


AS_USUAL = TemplateOptions()


class Tokenizer(Protocol):
    """What the front end needs of a tokenizer. Implementations are immutable and thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int: ...

    @property
    def oracle_token_ids(self) -> Sequence[Sequence[int]]:
        """For each oracle word, the token ids whose text is the word with one leading space."""
        ...

    @property
    def plain_text(self) -> Sequence[str | None]:
        """Per token id: its text when that never depends on the neighbours (the fast path of streaming), else None."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_string(self, token_id: int) -> str:
        """The vocabulary entry, as `/tokenize` with `return_token_strs` shows it."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """`after`: the end of the prompt. In some vocabularies it decides whether the first token begins with a space."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = AS_USUAL) -> str:
        """The prompt text of a conversation. Raises ValueError with the template's own message."""
        ...


SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_SPECIAL_SLOTS = 64
_BYTES_AT = _SPECIAL_SLOTS
_WORDS_AT = _BYTES_AT + 256
_CACHE_LIMIT = 1 << 16
_PIECES = re.compile(rb" ?[a-z]+|[!-`{-~]{1,2}| [!-`{-~]|[\x00-\xff]")
_CHUNK_BYTES = 4 * 1024
_PIECE_END = re.compile(rb"[a-z](?![a-z])|[\x00-\x1f\x7f-\xff]|.(?= )")
"""Places where a piece ends for certain, whatever follows."""
_SPECIALS = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")


def _vocabulary() -> list[bytes]:
    visible = [bytes([code]) for code in range(0x21, 0x7F)]
    letters = [bytes([code]) for code in range(0x61, 0x7B)]
    pairs = [first + second for first in [b" ", *visible] for second in visible]
    triples = [first + second + third for first in [b" ", *letters] for second in letters for third in letters]
    starts = [b" " + first + second + third for first in letters for second in letters for third in letters]
    specials = [token.encode() for token in SPECIAL_TOKENS]
    specials += [b"<|reserved_%d|>" % slot for slot in range(len(specials), _SPECIAL_SLOTS)]
    single_bytes = [bytes([code]) for code in range(256)]
    return [*specials, *single_bytes, *(f" {word}".encode() for word in WORDS), *pairs, *triples, *starts]


class BuiltinTokenizer:
    """Specials, single bytes, oracle words, pairs of visible characters, triples of letters, and such after a space."""

    def __init__(self) -> None:
        self._bytes_of = _vocabulary()
        first_plain = _WORDS_AT
        # Backwards, so that an oracle word of three letters keeps its own token and not the one of its letters.
        self._ids = {self._bytes_of[token]: token for token in reversed(range(_BYTES_AT, len(self._bytes_of)))}
        self._special_ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
        self._cache: dict[bytes, tuple[int, ...]] = {}
        self.vocab_size = len(self._bytes_of)
        self.eos_token_id = self._special_ids["<|im_end|>"]
        self.oracle_token_ids = tuple((_WORDS_AT + index,) for index in range(len(WORDS)))
        self.plain_text: list[str | None] = [
            piece.decode("ascii") if token >= first_plain or (token >= _BYTES_AT and piece < b"\x80") else None
            for token, piece in enumerate(self._bytes_of)
        ]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. There is no BOS, so `add_special_tokens` changes nothing."""
        if "<" not in text:
            return self._encode_plain(text)
        out: list[int] = []
        for part in _SPECIALS.split(text):
            special = self._special_ids.get(part)
            if special is None:
                out += self._encode_plain(part)
            else:
                out.append(special)
        return out

    def _encode_plain(self, text: str) -> list[int]:
        """In chunks: one search over a long text would hold the interpreter, and with it every other thread."""
        ids, cache = self._ids, self._cache
        data = text.encode("utf-8", "surrogatepass")
        out: list[int] = []
        start = 0
        while start < len(data):
            end = _PIECE_END.search(data, start + _CHUNK_BYTES)
            stop = len(data) if end is None else end.end()
            for piece in _PIECES.findall(data, start, stop):
                token = ids.get(piece)
                if token is not None:
                    out.append(token)
                else:
                    out += cache.get(piece) or self._split(piece)
            start = stop
        return out

    def _split(self, piece: bytes) -> tuple[int, ...]:
        """A run of letters that is no token of its own: a space with three letters, triples, a rest of one or two."""
        start = 4 if piece.startswith(b" ") else 3
        parts = [piece[:start], *(piece[at : at + 3] for at in range(start, len(piece), 3))]
        tokens = tuple(self._ids[part] for part in parts)
        if len(self._cache) < _CACHE_LIMIT and len(piece) < 64:
            self._cache[piece] = tokens
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_string(self, token_id: int) -> str:
        return self._bytes_of[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """The bytes of one token; unknown ids have none."""
        if token_id < _SPECIAL_SLOTS and skip_special_tokens:
            return b""
        return self._bytes_of[token_id] if token_id < self.vocab_size else b""

    def detokenizer(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> "BuiltinDetokenizer":
        """No token's text depends on those before it."""
        return BuiltinDetokenizer(self, skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = AS_USUAL) -> str:
        """ChatML. Raises ValueError for a template of the caller's own: those need a real tokenizer folder."""
        if options.chat_template is not None:
            raise ValueError(
                "the built-in tokenizer has one fixed chat template; load a folder with --tokenizer to use another"
            )
        parts = [_chatml("system", "Tools: " + repr([dict(tool) for tool in options.tools]))] if options.tools else []
        parts += [_chatml(str(message["role"]), _content_text(message)) for message in messages]
        if options.continue_final_message and parts:
            parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
        elif options.add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)


class BuiltinDetokenizer:
    """Mutable state of one sequence: at most three bytes of an unfinished character."""

    def __init__(self, tokenizer: BuiltinTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(self._tokenizer.token_bytes(token, skip_special_tokens=self._skip) for token in token_ids)
        return self._decode(data, final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        try:
            return self._decoder.decode(data, final)
        except UnicodeDecodeError:
            held = self._decoder.getstate()[0]
            self._decoder.reset()
            return (held + data).decode("utf-8", "replace")


def _chatml(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(part.get("text", "") for part in content or () if isinstance(part, Mapping))
    calls = message.get("tool_calls")
    return f"{text}{calls!r}" if calls else text
