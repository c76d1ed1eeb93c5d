"""Is this a schema at all? Checked once, before anything is made from it, with an error that names the fault."""

from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.regex import compiled
from windtunnel.wire.synth.validate import TYPES, is_number

MAX_SCHEMAS = 20_000
MAX_DEPTH = 64
MAX_COUNT = 2_000
UNSUPPORTED = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "dependencies", "additionalItems")

_ONE = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _small(value: Any) -> bool:
    return _count(value) and value <= MAX_COUNT


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _finite(value: Any) -> bool:
    return is_number(value) and abs(value) < 1e300


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "enum": (lambda value: isinstance(value, list) and len(value) > 0, "a list with at least one value"),
    "required": (_names, "a list of names"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_names, value.values())),
        "a map to lists of names",
    ),
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "$ref": (lambda value: isinstance(value, str), "a string"),
    "minimum": (_finite, "a number"),
    "maximum": (_finite, "a number"),
    "exclusiveMinimum": (_finite, "a number"),
    "exclusiveMaximum": (_finite, "a number"),
    "multipleOf": (lambda value: _finite(value) and value > 0, "a number above zero"),
    "minLength": (_small, f"a count of at most {MAX_COUNT}"),
    "minItems": (_small, f"a count of at most {MAX_COUNT}"),
    "minProperties": (_small, f"a count of at most {MAX_COUNT}"),
    "minContains": (_small, f"a count of at most {MAX_COUNT}"),
    "maxLength": (_count, "a count"),
    "maxItems": (_count, "a count"),
    "maxProperties": (_count, "a count"),
    "maxContains": (_count, "a count"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
}


def check_schema(schema: Any) -> None:
    """Raises SynthesisError for the first fault."""
    todo: list[tuple[Any, int]] = [(schema, 0)]
    seen = 0
    while todo:
        here, depth = todo.pop()
        seen += 1
        if seen > MAX_SCHEMAS or depth > MAX_DEPTH:
            raise SynthesisError("Grammar error: the schema is too large or too deep")
        if isinstance(here, bool):
            continue
        if not isinstance(here, dict):
            raise SynthesisError(f"Grammar error: a schema must be an object or a boolean, got {here!r}")
        _check_keywords(here)
        todo += [(child, depth + 1) for child in _children(here)]


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for name in schema.keys() & set(UNSUPPORTED):
        raise SynthesisError(f"Grammar error: Unimplemented keys: [{name!r}]")
    _check_type(schema.get("type"), "type" in schema)
    for name, (fits, form) in _FORMS.items():
        if name in schema and not fits(schema[name]):
            raise SynthesisError(f"Grammar error: {name} must be {form}, got {schema[name]!r}")
    for pattern in [*schema.get("patternProperties", ()), *([schema["pattern"]] if "pattern" in schema else [])]:
        compiled(pattern)


def _check_type(wanted: Any, given: bool) -> None:
    if not given:
        return
    names = wanted if isinstance(wanted, list) and wanted else [wanted]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise SynthesisError(f"Grammar error: Invalid type: {name}")


def _children(schema: Mapping[str, Any]) -> list[Any]:
    found = [schema[name] for name in _ONE if name in schema]
    for name in _LISTS:
        found += _typed(schema, name, list, "a list of schemas")
    for name in _MAPS:
        found += _typed(schema, name, dict, "a map to schemas").values() if name in schema else ()
    return found


def _typed(schema: Mapping[str, Any], name: str, kind: type, form: str) -> Any:
    value = schema.get(name, kind())
    if not isinstance(value, kind) or (kind is list and name in schema and not value):
        raise SynthesisError(f"Grammar error: {name} must be {form}, got {value!r}")
    return value
