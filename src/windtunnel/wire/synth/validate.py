"""Is a JSON value valid against a schema (draft 2020-12, without the `unevaluated…` keywords)? Bounded in time."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.regex import compiled

Schema = Any
MAX_CHECKS = 200_000
MAX_DEPTH = 120

TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal(first: Any, second: Any) -> bool:
    """JSON equality: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    return bool(first == second) and isinstance(first, str) == isinstance(second, str)


def multiple_of(value: float, step: float) -> bool:
    """As the jsonschema library decides it, floats included."""
    if isinstance(step, float):
        quotient = value / step
        return math.isfinite(quotient) and int(quotient) == quotient
    return value % step == 0


class Validator:
    """Checks values against sub-schemas of one root. Mutable: counts its checks, so that none runs for ever."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MAX_CHECKS
        self._depth = 0

    def resolve(self, reference: str) -> Schema:
        """The schema behind a local `$ref`. Raises SynthesisError for anything else."""
        if not reference.startswith("#"):
            raise SynthesisError(f"Grammar error: $ref {reference!r} is not inside the schema")
        here = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            elif isinstance(here, dict) and key in here:
                here = here[key]
            else:
                raise SynthesisError(f"Grammar error: $ref {reference!r} points to nothing")
        return here

    def valid(self, value: Any, schema: Schema) -> bool:
        """Raises SynthesisError when the schema is too deep or too large to be decided."""
        if isinstance(schema, bool):
            return schema
        self._left -= 1
        if self._left < 0 or self._depth > MAX_DEPTH:
            raise SynthesisError("Grammar error: the schema is too complex")
        self._depth += 1
        try:
            return all(self._keyword(name, value, schema) for name in schema if name in _KEYWORDS)
        finally:
            self._depth -= 1

    def _keyword(self, name: str, value: Any, schema: Mapping[str, Any]) -> bool:
        applies, check = _KEYWORDS[name]
        return not applies(value) or check(self, value, schema[name], schema)


def _any(value: Any) -> bool:
    return True


def _type(_v: Validator, value: Any, wanted: Any, _schema: Mapping[str, Any]) -> bool:
    return any(TYPES[name](value) for name in ([wanted] if isinstance(wanted, str) else wanted))


def _unique(value: list[Any]) -> bool:
    return all(not equal(one, other) for at, one in enumerate(value) for other in value[:at])


def _items(v: Validator, value: list[Any], wanted: Any, schema: Mapping[str, Any]) -> bool:
    return all(v.valid(item, wanted) for item in value[len(schema.get("prefixItems", ())) :])


def _contains(v: Validator, value: list[Any], wanted: Any, schema: Mapping[str, Any]) -> bool:
    found = sum(v.valid(item, wanted) for item in value)
    return bool(schema.get("minContains", 1) <= found <= schema.get("maxContains", len(value)))


def extras(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Members that neither `properties` nor `patternProperties` describe."""
    patterns = [compiled(pattern) for pattern in schema.get("patternProperties", ())]
    known: Mapping[str, Any] = schema.get("properties", {})
    return [key for key in value if key not in known and not any(pattern.search(key) for pattern in patterns)]


def _additional(v: Validator, value: dict[str, Any], wanted: Any, schema: Mapping[str, Any]) -> bool:
    return all(v.valid(value[key], wanted) for key in extras(value, schema))


def _patterned(v: Validator, value: dict[str, Any], wanted: Any, _schema: Mapping[str, Any]) -> bool:
    pairs = [(key, schema) for pattern, schema in wanted.items() for key in value if compiled(pattern).search(key)]
    return all(v.valid(value[key], schema) for key, schema in pairs)


def _condition(v: Validator, value: Any, wanted: Any, schema: Mapping[str, Any]) -> bool:
    return v.valid(value, schema.get("then" if v.valid(value, wanted) else "else", True))


_NUM, _STR, _ARR, _OBJ = is_number, TYPES["string"], TYPES["array"], TYPES["object"]
_KEYWORDS: Mapping[str, tuple[Callable[[Any], bool], Callable[[Validator, Any, Any, Mapping[str, Any]], bool]]] = {
    "type": (_any, _type),
    "enum": (_any, lambda v, value, wanted, s: any(equal(value, one) for one in wanted)),
    "const": (_any, lambda v, value, wanted, s: equal(value, wanted)),
    "minimum": (_NUM, lambda v, value, wanted, s: value >= wanted),
    "maximum": (_NUM, lambda v, value, wanted, s: value <= wanted),
    "exclusiveMinimum": (_NUM, lambda v, value, wanted, s: value > wanted),
    "exclusiveMaximum": (_NUM, lambda v, value, wanted, s: value < wanted),
    "multipleOf": (_NUM, lambda v, value, wanted, s: multiple_of(value, wanted)),
    "minLength": (_STR, lambda v, value, wanted, s: len(value) >= wanted),
    "maxLength": (_STR, lambda v, value, wanted, s: len(value) <= wanted),
    "pattern": (_STR, lambda v, value, wanted, s: compiled(wanted).search(value)),
    "minItems": (_ARR, lambda v, value, wanted, s: len(value) >= wanted),
    "maxItems": (_ARR, lambda v, value, wanted, s: len(value) <= wanted),
    "uniqueItems": (_ARR, lambda v, value, wanted, s: not wanted or _unique(value)),
    "prefixItems": (_ARR, lambda v, value, wanted, s: all(map(v.valid, value, wanted))),
    "items": (_ARR, _items),
    "contains": (_ARR, _contains),
    "minProperties": (_OBJ, lambda v, value, wanted, s: len(value) >= wanted),
    "maxProperties": (_OBJ, lambda v, value, wanted, s: len(value) <= wanted),
    "required": (_OBJ, lambda v, value, wanted, s: all(key in value for key in wanted)),
    "properties": (_OBJ, lambda v, value, wanted, s: all(v.valid(value[k], wanted[k]) for k in value if k in wanted)),
    "patternProperties": (_OBJ, _patterned),
    "additionalProperties": (_OBJ, _additional),
    "propertyNames": (_OBJ, lambda v, value, wanted, s: all(v.valid(key, wanted) for key in value)),
    "dependentRequired": (_OBJ, lambda v, value, wanted, s: all(n in value for k in wanted if k in value for n in wanted[k])),
    "dependentSchemas": (_OBJ, lambda v, value, wanted, s: all(v.valid(value, wanted[k]) for k in wanted if k in value)),
    "allOf": (_any, lambda v, value, wanted, s: all(v.valid(value, one) for one in wanted)),
    "anyOf": (_any, lambda v, value, wanted, s: any(v.valid(value, one) for one in wanted)),
    "oneOf": (_any, lambda v, value, wanted, s: sum(v.valid(value, one) for one in wanted) == 1),
    "not": (_any, lambda v, value, wanted, s: not v.valid(value, wanted)),
    "if": (_any, _condition),
    "$ref": (_any, lambda v, value, wanted, s: v.valid(value, v.resolve(wanted))),
}
