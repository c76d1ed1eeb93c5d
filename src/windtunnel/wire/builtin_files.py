"""The built-in tokenizer as the files of a tokenizer folder, so that a router can tokenise for this server.

The same ids as `BuiltinTokenizer` for every text that is Unicode, and the same conversations but for `tools` and tool calls,
which a template writes as JSON.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from windtunnel.core.tokenizer import SPECIAL_TOKENS, BuiltinTokenizer
from windtunnel.core.words import WORDS

EOS, UNKNOWN = "<|im_end|>", "<unk>"
_PIECES = r" ?[a-z]+|[!-`{-~]{1,2}| [!-`{-~]|[\s\S]"
_IN_PIECES = rf"\A (?:{'|'.join(WORDS)})\z| [a-z]{{1,3}}|[a-z]{{1,3}}|[\s\S]+"
"""A whole oracle word, or a run of letters in threes; other pieces stay whole."""
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ part['text'] or '' }}{% endfor %}
{%- endif %}
{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@cache
def tokenizer_files() -> Mapping[str, bytes]:
    """File names to contents. Made once: about a megabyte."""
    tokenizer = BuiltinTokenizer()
    names = {"eos_token": EOS, "unk_token": UNKNOWN}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **names, "chat_template": _TEMPLATE}
    values = {"tokenizer.json": _tokenizer(tokenizer), "tokenizer_config.json": config, "special_tokens_map.json": names}
    files = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in values.items()}
    return files | {"chat_template.jinja": _TEMPLATE.encode()}


def _tokenizer(tokenizer: BuiltinTokenizer) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in (_PIECES, _IN_PIECES)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "WordPiece", "unk_token": UNKNOWN, "continuing_subword_prefix": "", "max_input_chars_per_word": 100}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, token) for number, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {**model, "vocab": _vocabulary(tokenizer)},
    }


def _added(number: int, token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token, **flags}


def _vocabulary(tokenizer: BuiltinTokenizer) -> dict[str, int]:
    """Of tokens with the same bytes the first one, which is the one that `encode` gives."""
    letters = _byte_letters()
    out: dict[str, int] = {}
    for token in range(tokenizer.vocab_size):
        spelled = "".join(letters[byte] for byte in tokenizer.token_bytes(token, skip_special_tokens=False))
        out.setdefault(spelled, token)
    return out


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte, as every byte-level vocabulary has it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
