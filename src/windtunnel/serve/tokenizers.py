"""Real tokenizers from a local folder (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`). No download, ever.

The chat template runs in a jinja2 sandbox set up as transformers does it: `trim_blocks`, `lstrip_blocks`, loop controls,
`tojson` without HTML escaping, `raise_exception`, `strftime_now`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from windtunnel.core.tokenizer import AS_USUAL, TemplateOptions, Tokenizer
from windtunnel.core.words import WORDS
from windtunnel.wire.decode_stream import TokenTexts

_MARK = "continue-here-4f1c9a"
_LONG_CHARS = 4096
_NO_CHARACTER = "\ufffd"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder, or of a `tokenizer.json` file. Raises ValueError saying what is missing."""
    folder = Path(path)
    file = folder if folder.is_file() else folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no tokenizer.json in {folder}: give a folder of a model, or the file itself")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    return FolderTokenizer(inner, _config(file.parent), _template(file.parent))


def _config(folder: Path) -> dict[str, Any]:
    return _json_object(folder / "tokenizer_config.json")


def _json_object(file: Path) -> dict[str, Any]:
    """Empty where there is none."""
    value: Any = json.loads(file.read_text()) if file.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return value


def _template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    value = _config(folder).get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return str(named["default"]) if "default" in named else None
    return value if isinstance(value, str) else None


def generation_config(path: str | Path) -> dict[str, Any]:
    """`generation_config.json` of the folder: EOS ids and sampling defaults. Empty where there is none."""
    folder = Path(path)
    return _json_object((folder.parent if folder.is_file() else folder) / "generation_config.json")


class FolderTokenizer:
    """A `tokenizers.Tokenizer` behind the `Tokenizer` protocol. Immutable after construction."""

    def __init__(self, inner: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None) -> None:
        self._inner = inner
        self._template = template
        self._names = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = self._eos()
        self.plain_text: Sequence[str | None] = _plain_texts(inner, self.vocab_size)
        self.oracle_token_ids: Sequence[Sequence[int]] = [
            tuple(ids.ids) for ids in inner.encode_batch([f" {word}" for word in WORDS], add_special_tokens=False)
        ]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A long text is a batch of its own: the library lets other threads run while it encodes a batch, and only then."""
        if len(text) > _LONG_CHARS:
            (encoded,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoded = self._inner.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token_id: int) -> str:
        return self._inner.id_to_token(token_id) or ""

    def detokenizer(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> "FolderDetokenizer":
        known = [token for token in after if token < self.vocab_size]
        return FolderDetokenizer(self._inner, skip_special_tokens, known)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = AS_USUAL) -> str:
        """The rendered prompt. Raises ValueError with the template's own message."""
        source = options.chat_template or self._template
        if source is None:
            raise ValueError("this tokenizer folder has no chat template; put a chat_template.jinja beside tokenizer.json")
        shown = [dict(message) for message in messages]
        if options.continue_final_message:
            shown[-1] = shown[-1] | {"content": str(shown[-1].get("content") or "") + _MARK}
        told = {"messages": shown, "tools": options.tools, "add_generation_prompt": options.add_generation_prompt}
        text = _rendered(source, self._names | told | dict(options.kwargs or {}))
        return _cut_at_mark(text) if options.continue_final_message else text

    def _eos(self) -> int:
        token = self._inner.token_to_id(self._names["eos_token"]) if self._names["eos_token"] else None
        return 0 if token is None else int(token)


class FolderDetokenizer:
    """Mutable state of one sequence: the library's incremental decoder. It has read the end of the prompt, as in vLLM 0.33."""

    def __init__(self, inner: tokenizers.Tokenizer, skip_special_tokens: bool, after: Sequence[int]) -> None:
        self._texts = TokenTexts(inner, skip_special_tokens=skip_special_tokens)
        self.push(_whole_characters(inner, after))

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._texts.text(token) for token in token_ids])

    def flush(self) -> str:
        return ""


def _whole_characters(inner: tokenizers.Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """The longest end that begins with a character: bytes whose first one is missing would be said with the answer."""
    ends = (token_ids[start:] for start in range(len(token_ids)))
    return next((end for end in ends if _NO_CHARACTER not in inner.decode(list(end), skip_special_tokens=False)), ())


def _content(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _plain_texts(inner: tokenizers.Tokenizer, vocab_size: int) -> list[str | None]:
    """Texts of tokens that never depend on their neighbours: ordinary ASCII pieces of a byte-level vocabulary."""
    if type(inner.decoder).__name__ != "ByteLevel":
        return [None] * vocab_size
    added = set(inner.get_added_tokens_decoder())
    texts = inner.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    return [text if token not in added and text and text.isascii() else None for token, text in enumerate(texts)]


def _cut_at_mark(text: str) -> str:
    """The prompt up to the end of the last message, as transformers cuts it for `continue_final_message`."""
    at = text.rfind(_MARK)
    if at < 0:
        raise ValueError("continue_final_message is set but the last message does not appear in the rendered template")
    return text[:at]


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _strftime_now
    return made


_ENVIRONMENT = _environment()


def _rendered(source: str, names: Mapping[str, Any]) -> str:
    try:
        return _ENVIRONMENT.from_string(source).render(names)
    except (jinja2.exceptions.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(str(error)) from error
