"""Takes keys and personal data out of documents before anybody sees them.

What is replaced: the values of secret headers and variables by their exact text, wherever they turn up (an error body may echo
them); what follows the name of a secret (`is_secret`) in a flag, a variable, a header, a URL's query, JSON or a Python repr;
what is a key by its form; user names in home folders, and e-mail addresses. A secret that has none of these is not recognised.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

REPLACEMENT = "<removed>"
_SECRET_HEADERS = re.compile(r"auth(?!or\b)|key|token(?!s|iz)|cookie|secret|pass(?:w|phrase|$)|pwd|credential", re.IGNORECASE)
_LEAST_LENGTH = 4
_URL_USER = re.compile(r"(://)[^/@\s]+@")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(r"pass|pwd|passphrase|credentials?|\w*(?:password|passwd|apikey|secret)|authorization|cookie")
"""The last word of a secret's name, whatever stands before it."""
_OF_KEY = frozenset("access account admin api auth encryption master private secret service signing subscription".split())
"""The word before `key`."""
_OF_TOKEN = frozenset(
    "access api auth bearer bot client csrf github gitlab hf hub id oauth refresh secret security session".split()
)
"""The word before `token`."""
_NOT_OF_TOKEN = frozenset("bos end eos first image last max min new next output pad per sep special start stop unk".split())
"""The word before `token` in names of flags and variables that hold none."""
_NAME = re.compile(
    r"(?<![\w-])(?P<dashes>--)?(?P<name>[A-Za-z_][\w.-]{0,100})"
    r"(?:(?P<separator>\\?[\"']?\s*[=:]\s*)|(?(dashes)(?:[= ]+|[\"'],\s*(?=[\"']))|(?!)))"
)
_VALUE = re.compile(r"\\\"[^\"\\]*|\"[^\"\n]*|'[^'\n]*|\[[^\]\n]*|[^\s\"'&,;)}\]]+")
_LINE = re.compile(r"[^\"'\r\n]+")
"""The value of a header that has blanks in it."""
_NOTHING = frozenset({"none", "null", "true", "false"})
_HEADER = re.compile(r"((?:-H|--header)[= ]*(?P<quote>[\"'])(?P<name>[\w-]+)\s*:\s*)(?:(?!(?P=quote)).)+")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}", re.IGNORECASE), rf"\1 {REPLACEMENT}"),
    (re.compile(r"\b(?:sk|pk|hf|gh[pousr]|github_pat|glpat|xox[abprs])[-_][\w-]{8,}"), REPLACEMENT),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REPLACEMENT),
    (re.compile(r"\bAIza[\w-]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), REPLACEMENT),
    (re.compile(r"(/(?:home|Users)/)[^/\s\"':]+"), rf"\1{REPLACEMENT}"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}"), REPLACEMENT),
    (_URL_USER, rf"\1{REPLACEMENT}@"),
)


def is_secret(name: str, *, spoken: bool = False) -> bool:
    """Whether what has this name is a secret; `spoken` where a flag or a URL's parameter has it: `key` alone is one there."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words[-2:] == ["key", "id"]:
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else None
    loud = spoken or name.isupper()
    if last == "key":
        return before in _OF_KEY or (loud and before != "cache")
    if last == "token":
        return before in _OF_TOKEN or (loud and before not in _NOT_OF_TOKEN)
    return bool(_ALWAYS.fullmatch(last)) or (spoken and last in ("sig", "signature"))


def secrets_of(headers: Mapping[str, str]) -> set[str]:
    """The values that must not be seen, and the part of each after its scheme (`Bearer …`)."""
    values = {value for name, value in headers.items() if _SECRET_HEADERS.search(name)}
    return {part for value in values for part in (value, value.rpartition(" ")[2]) if len(part) >= _LEAST_LENGTH}


def hide_passwords(text: str) -> str:
    """The same text without the user part of its URLs: for messages to whoever typed them, and to the log that keeps them."""
    return _URL_USER.sub(rf"\1{REPLACEMENT}@", text)


def redact_file(path: Path, secrets: Iterable[str] = ()) -> None:
    """Clean a text file in place, line by line."""
    if not path.exists():
        return
    longest_first = sorted(set(secrets), key=len, reverse=True)
    draft = path.with_name(f"{path.name}.draft")
    with path.open(encoding="utf-8", errors="replace") as source, draft.open("w", encoding="utf-8") as out:
        for line in source:
            out.write(_clean_text(line, longest_first))
    draft.replace(path)


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """The same document with every text cleaned. Numbers, keys and shape stay."""
    longest_first = sorted(set(secrets), key=len, reverse=True)
    return _clean(value, longest_first)


def _clean(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return _clean_text(value, secrets)
    if isinstance(value, Mapping):
        return {key: _clean_entry(str(key), one, secrets) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one, secrets) for one in value]
    return value


def _clean_entry(name: str, value: Any, secrets: list[str]) -> Any:
    return REPLACEMENT if isinstance(value, str) and value and is_secret(name) else _clean(value, secrets)


def _clean_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REPLACEMENT)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    text = _HEADER.sub(lambda found: f"{found[1]}{REPLACEMENT}" if _SECRET_HEADERS.search(found["name"]) else found[0], text)
    out, at = [], 0
    for start, end in _named_values(text):
        out += [text[at:start], REPLACEMENT]
        at = end
    return "".join([*out, text[at:]])


def _named_values(text: str) -> Iterator[tuple[int, int]]:
    """Where the values of named secrets are, without their quotes."""
    done = 0
    for found in _NAME.finditer(text):
        if found.start() < done:
            continue
        span = _value_of(text, found)
        if span is not None:
            yield span
            done = span[1]


def _value_of(text: str, found: re.Match[str]) -> tuple[int, int] | None:
    """What follows a name, when that is a secret's."""
    name, separator = found["name"], found["separator"] or "="
    query = text[found.start() - 1 : found.start()] in ("?", "&")
    if is_secret(name, spoken=bool(found["dashes"]) or query):
        whole = name.lower().endswith(("authorization", "cookie")) and ":" in separator
        value = (_LINE.match(text, found.end()) if whole else None) or _VALUE.match(text, found.end())
        least = 1
    else:
        value = _VALUE.match(text, found.end()) if name.lower() == "token" and separator.strip() != ":" else None
        least = 8
    if value is None:
        return None
    opening = re.match(r"\\?[\"'\[]*", value[0])
    assert opening is not None
    start, bare = value.start() + opening.end(), value[0][opening.end() :].rstrip("'")
    if len(bare) < least or bare.lower() in _NOTHING:
        return None
    return start, start + len(bare)
