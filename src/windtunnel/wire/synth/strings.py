"""A string for `pattern`, `format`, `minLength` and `maxLength`."""

from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.core.words import WORDS
from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.merge import Impossible
from windtunnel.wire.synth.regex import compiled

MAX_TRIES = 40
_MANY = 1 << 30


def string(flat: Mapping[str, Any], draw: Draw) -> str:
    """Raises Impossible when no candidate fits."""
    low, high = flat.get("minLength", 0), flat.get("maxLength", _MANY)
    if low > high:
        raise Impossible
    if "pattern" in flat:
        return _patterned(flat["pattern"], low, high, draw)
    make = FORMATS.get(flat.get("format", ""))
    if make is not None:
        text = make(draw)
        if low <= len(text) <= high:
            return text
    return _words(low, high, draw)


def _patterned(pattern: str, low: int, high: int, draw: Draw) -> str:
    regex = compiled(pattern)
    for extra in range(MAX_TRIES):
        grown = 0 if extra < MAX_TRIES // 2 else max(0, low // 2) + (extra - MAX_TRIES // 2) * max(1, low // 10)
        core = regex.text(draw, grown)
        for text in (core, core.ljust(low, "a"), core.rjust(low, "a")):
            if low <= len(text) <= high and regex.search(text):
                return text
    raise Impossible


def _words(low: int, high: int, draw: Draw) -> str:
    text = WORDS[draw.below(len(WORDS))]
    while len(text) < low:
        text += f" {WORDS[draw.below(len(WORDS))]}"
    return text[: max(low, min(high, len(text)))]


def _hex(draw: Draw, size: int) -> str:
    return "".join("0123456789abcdef"[draw.below(16)] for _ in range(size))


def _date(draw: Draw) -> str:
    return f"20{draw.between(10, 29)}-{draw.between(1, 12):02d}-{draw.between(1, 28):02d}"


def _time(draw: Draw) -> str:
    return f"{draw.below(24):02d}:{draw.below(60):02d}:{draw.below(60):02d}Z"


def _word(draw: Draw) -> str:
    return WORDS[draw.below(len(WORDS))]


FORMATS: Mapping[str, Callable[[Draw], str]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda draw: f"{_date(draw)}T{_time(draw)}",
    "duration": lambda draw: f"P{draw.between(1, 9)}D",
    "email": lambda draw: f"{_word(draw)}@example.com",
    "idn-email": lambda draw: f"{_word(draw)}@example.com",
    "hostname": lambda draw: f"{_word(draw)}.example.com",
    "idn-hostname": lambda draw: f"{_word(draw)}.example.com",
    "ipv4": lambda draw: f"192.0.2.{draw.between(1, 254)}",
    "ipv6": lambda draw: f"2001:db8::{_hex(draw, 3)}1",
    "uri": lambda draw: f"https://example.com/{_word(draw)}",
    "uri-reference": lambda draw: f"/{_word(draw)}",
    "iri": lambda draw: f"https://example.com/{_word(draw)}",
    "iri-reference": lambda draw: f"/{_word(draw)}",
    "uri-template": lambda draw: f"/{_word(draw)}/{{id}}",
    "uuid": lambda draw: f"{_hex(draw, 8)}-{_hex(draw, 4)}-4{_hex(draw, 3)}-a{_hex(draw, 3)}-{_hex(draw, 12)}",
    "json-pointer": lambda draw: f"/{_word(draw)}",
    "relative-json-pointer": lambda draw: f"{draw.below(4)}/{_word(draw)}",
    "regex": lambda draw: f"^{_word(draw)}$",
}
