"""What the text of a flag means: one parser for each kind of value. Each raises ValueError with the value as it was given."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.core.profile import Profile, from_mapping
from windtunnel.core.units import LONGEST_S, parse_duration_ns
from windtunnel.serve.config import TOO_DEEP
from windtunnel.serve.failures import FAILURES

Parse = Callable[[Any], Any]


def duration(value: Any) -> int:
    return parse_duration_ns(value)


def seconds(value: Any) -> int:
    """Durations of flags that the real server counts in seconds: a bare number is seconds, a text may have a unit."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration")
    try:
        seconds = float(value)
    except ValueError:
        return parse_duration_ns(value)
    if not 0 <= seconds <= LONGEST_S:
        raise ValueError(f"{value} is out of range: it must be between 0 and {LONGEST_S} seconds")
    return round(seconds * 1e9)


def whole(value: Any) -> int:
    """Of digits, or a number of JSON. Raises ValueError with the value as it was given."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return int(value)
    raise ValueError(f"{str(value)[:_SHOWN_CHARS]!r} is not a whole number")


_SHOWN_CHARS = 100


def integer(low: int, high: int = 1 << 62) -> Parse:
    def parse(value: Any) -> int:
        number = whole(value)
        if not low <= number <= high:
            bound = f" and at most {high}" if high < 1 << 62 else ""
            raise ValueError(f"{number} is out of range: it must be at least {low}{bound}")
        return number

    return parse


def optional(parse: Parse) -> Parse:
    return lambda value: None if value in (None, "none", "None", "null") else parse(value)


def number(low: float, high: float) -> Parse:
    def parse(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{str(value)[:_SHOWN_CHARS]!r} is not a number")
        if not low <= number <= high:
            raise ValueError(f"{number} is out of range: it must be between {low} and {high}")
        return number

    return parse


def boolean(value: Any) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def grpc_switch(value: Any) -> int | None:
    """vLLM's `--grpc` has gRPC in place of HTTP; here both are served."""
    return _GRPC_PORT if boolean(value) else None


_GRPC_PORT = 50051


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a non-empty text")
    return value


def choice(*allowed: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return parse


def mode(value: Any) -> str:
    """`random` is llm-d-inference-sim's name for sentences of a fixed list."""
    return choice("oracle", "echo", "sentence")("sentence" if value == "random" else value)  # type: ignore[no-any-return]


def megabytes(value: Any) -> int:
    return int(integer(1, 1024)(value)) * 1024 * 1024


def texts(value: Any) -> tuple[str, ...]:
    return tuple(text(item) for item in (value if isinstance(value, list | tuple) else [value]))


def json_texts(value: Any) -> tuple[str, ...]:
    """vLLM writes such lists as JSON on the command line."""
    if isinstance(value, list | tuple):
        value = value[0] if len(value) == 1 else list(value)
    items = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    return tuple(items) if isinstance(items, list | tuple) else (str(items),)


def failure_types(value: Any) -> tuple[str, ...]:
    kinds = texts(value) if value else ()
    for kind in kinds:
        if kind not in FAILURES:
            raise ValueError(f"{kind!r} is not one of {', '.join(FAILURES)}")
    return kinds


def map_or_array(value: Any) -> str:
    return "map" if boolean(value) else "array"


_LONGEST_ANSWER = 1 << 31


def span(value: Any) -> tuple[int, int]:
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError(f"{value!r} is not a range: write LOW:HIGH")
    low, high = map(whole, parts)
    if not 1 <= low <= high <= _LONGEST_ANSWER:
        raise ValueError(f"{low}:{high} is not a range: write LOW:HIGH with 1 <= LOW <= HIGH <= {_LONGEST_ANSWER}")
    return low, high


def lora_modules(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple(_lora_module(item) for item in (value if isinstance(value, list | tuple) else [value]))


def _lora_module(item: str) -> tuple[str, str]:
    if item.lstrip().startswith("{"):
        fields = json.loads(item)
        return str(fields["name"]), str(fields["path"])
    name, separator, path = item.partition("=")
    if not separator or not name or not path:
        raise ValueError(f"{item!r} is not NAME=PATH")
    return name, path


def profile(value: Any) -> Profile:
    """A file's name, or the content itself (`/admin/config`)."""
    if isinstance(value, Mapping):
        return from_mapping(value)
    name = text(value)
    try:
        with open(name, encoding="utf-8") as file:
            return from_mapping(json.loads(file.read(_LARGEST_PROFILE)))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{name}: {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_LARGEST_PROFILE = 1 << 20
