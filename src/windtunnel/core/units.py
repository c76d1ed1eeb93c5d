"""Time inside windtunnel is an integer number of nanoseconds, in names that end in `_ns`."""

import re
from decimal import Decimal

US = 1_000
MS = 1_000_000
S = 1_000_000_000

LONGEST_S = 10**9
_LONGEST_TEXT = 100

_UNITS_NS = {"ns": 1, "us": US, "µs": US, "ms": MS, "s": S, "m": 60 * S, "h": 3600 * S}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")


def parse_duration_ns(text: str | int | float) -> int:
    """Nanoseconds of a duration such as `250ms`, `1.5s`, `1m30s` or `0`.

    A bare number other than zero is refused: nobody knows whether 20 means seconds or milliseconds. So is more than
    `LONGEST_S` seconds: clocks and timers have limits. Raises ValueError with the right form in the message.
    """
    if text in (0, "0"):
        return 0
    if isinstance(text, str) and len(text) <= _LONGEST_TEXT:
        parts = _PART.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            duration = sum(Decimal(number) * _UNITS_NS[unit] for number, unit in parts)
            if duration > LONGEST_S * S:
                raise ValueError(f"{text} is out of range: it must be at most {LONGEST_S}s")
            return sum(round(Decimal(number) * _UNITS_NS[unit]) for number, unit in parts)
    raise ValueError(
        f"{repr(text)[:_LONGEST_TEXT]} is not a duration: write a number with a unit, such as 250ms, 1.5s or 1m30s"
    )


def format_duration(ns: int) -> str:
    """The shortest exact form that `parse_duration_ns` reads back."""
    for unit in ("s", "ms", "us"):
        scale = _UNITS_NS[unit]
        if ns and ns % scale == 0:
            return f"{ns // scale}{unit}"
    return f"{ns}ns" if ns else "0"
