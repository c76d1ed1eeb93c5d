"""Takes keys and personal data out of documents before anybody sees them.

What is replaced: the values of secret headers by their exact text, wherever they turn up (an error body may echo them);
what looks like a key or follows a key's flag; user names in home folders, and e-mail addresses. Errors on the safe side.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REPLACEMENT = "<removed>"
_SECRET_HEADERS = re.compile(r"auth|key|token|cookie|secret", re.IGNORECASE)
_LEAST_LENGTH = 4
_URL_USER = re.compile(r"(://)[^/@\s]+@")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(--[\w-]*(?:(?:key|secret|password)[\w-]*|token)[= ]+)(\"[^\"]*\"|'[^']*'|[^\s\"']+)", re.IGNORECASE),
        rf"\1{REPLACEMENT}",
    ),
    (re.compile(r"\b((?:[A-Z]+_)?(?:API_KEY|TOKEN|SECRET|PASSWORD)=)\S+"), rf"\1{REPLACEMENT}"),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}", re.IGNORECASE), rf"\1 {REPLACEMENT}"),
    (re.compile(r"\b(?:sk|pk|hf|ghp|xox[abp])[-_][\w-]{8,}"), REPLACEMENT),
    (re.compile(r"(/(?:home|Users)/)[^/\s\"':]+"), rf"\1{REPLACEMENT}"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}"), REPLACEMENT),
    (_URL_USER, rf"\1{REPLACEMENT}@"),
)


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
        return {key: _clean(one, secrets) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one, secrets) for one in value]
    return value


def _clean_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REPLACEMENT)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
