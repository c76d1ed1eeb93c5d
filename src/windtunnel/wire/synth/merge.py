"""Two schemas that must both hold, as one: keyword by keyword."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.wire.synth.validate import equal


class Impossible(Exception):
    """This attempt leads nowhere; another choice may."""


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that asks for what both ask. Raises Impossible when they contradict each other on sight.

    Of keywords without a rule the second side is kept: the finished value is judged against the whole schema anyway.
    """
    first, second = _closed(first, second), _closed(second, first)
    out = dict(first)
    for name, value in second.items():
        if name not in out or equal(out[name], value):
            out[name] = value
        else:
            out[name] = _RULES[name](out[name], value) if name in _RULES else value
    return out


def _closed(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """`one` with what `other` says about the members and items that only `one` describes."""
    out = dict(one)
    extra = other.get("additionalProperties", True)
    if extra is not True and "properties" in one and not other.get("patternProperties"):
        known = other.get("properties", {})
        out["properties"] = {key: value if key in known else _both(value, extra) for key, value in one["properties"].items()}
    items = other.get("items", True)
    if items is not True and "prefixItems" in one:
        fixed = len(other.get("prefixItems", ()))
        out["prefixItems"] = [value if at < fixed else _both(value, items) for at, value in enumerate(one["prefixItems"])]
    return out


def _types(first: Any, second: Any) -> list[str]:
    one, other = ([side] if isinstance(side, str) else list(side) for side in (first, second))
    both = [name for name in one if name in other]
    if "integer" not in both and (("integer" in one and "number" in other) or ("integer" in other and "number" in one)):
        both.append("integer")
    if not both:
        raise Impossible
    return both


def _enums(first: list[Any], second: list[Any]) -> list[Any]:
    both = [value for value in first if any(equal(value, other) for other in second)]
    if not both:
        raise Impossible
    return both


def _fail(_first: Any, _second: Any) -> Any:
    raise Impossible


def _maps(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(first)
    for key, value in second.items():
        out[key] = _both(out[key], value) if key in out else value
    return out


def _both(first: Any, second: Any) -> Any:
    if first is True or second is True:
        return second if first is True else first
    return {"allOf": [first, second]}


def _prefix(first: list[Any], second: list[Any]) -> list[Any]:
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    return [_both(value, shorter[at]) if at < len(shorter) else value for at, value in enumerate(longer)]


def _names(first: Mapping[str, list[str]], second: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {key: [*first.get(key, ()), *second.get(key, ())] for key in {**first, **second}}


def _multiple(first: float, second: float) -> float:
    if isinstance(first, int) and isinstance(second, int):
        return math.lcm(first, second)
    return max(first, second)


_RULES: Mapping[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _enums,
    "const": _fail,
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "properties": _maps,
    "patternProperties": _maps,
    "dependentSchemas": _maps,
    "dependentRequired": _names,
    "items": _both,
    "contains": _both,
    "additionalProperties": _both,
    "propertyNames": _both,
    "not": lambda first, second: {"anyOf": [first, second]},
    "prefixItems": _prefix,
    "multipleOf": _multiple,
    "uniqueItems": lambda first, second: first or second,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"), min),
}
