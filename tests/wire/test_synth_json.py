"""Synthesised values against the jsonschema library as judge, over generated schemas."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.wire.synth import SynthesisError, json_text, json_value

NAMES = st.sampled_from(["a", "b", "city", "näme", "x-y"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=4)
PATTERNS = st.sampled_from(["^a+b{2}$", "[0-9]{3}", "^(foo|bar)-\\d+$", "x", "^[^a-z]{1,4}$", "\\w\\s\\w", "^.{2,5}$"])


def _maybe(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _tagged(name: str, keywords: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return keywords.map(lambda found: {"type": name} | found)


BOUNDS = _maybe(
    minimum=st.integers(-20, 20),
    maximum=st.integers(0, 40),
    exclusiveMinimum=st.floats(-20, 5),
    exclusiveMaximum=st.integers(6, 50),
    multipleOf=st.sampled_from([1, 2, 3, 7, 0.5, 0.1, 2.5]),
)
FORMATS = st.sampled_from(["date", "date-time", "email", "uuid", "ipv4", "uri", "unknown"])
STRINGS = _maybe(minLength=st.integers(0, 12), maxLength=st.integers(0, 20), pattern=PATTERNS, format=FORMATS)
LEAVES = (
    st.just({})
    | st.booleans()
    | st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values})
    | SCALARS.map(lambda value: {"const": value})
    | st.sampled_from(["null", "boolean"]).map(lambda name: {"type": name})
    | _tagged("integer", BOUNDS)
    | _tagged("number", BOUNDS)
    | _tagged("string", STRINGS)
    | st.lists(st.sampled_from(["string", "integer", "null", "array", "object"]), min_size=1, max_size=3, unique=True).map(
        lambda names: {"type": names}
    )
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=3)
    arrays = _maybe(
        items=inner,
        prefixItems=few,
        minItems=st.integers(0, 4),
        maxItems=st.integers(0, 6),
        uniqueItems=st.booleans(),
        contains=inner,
        minContains=st.integers(0, 2),
    )
    objects = _maybe(
        properties=st.dictionaries(NAMES, inner, max_size=4),
        required=st.lists(NAMES, max_size=3, unique=True),
        additionalProperties=inner,
        patternProperties=st.dictionaries(st.sampled_from(["^a", "y$"]), inner, max_size=1),
        minProperties=st.integers(0, 3),
        maxProperties=st.integers(0, 5),
        propertyNames=st.sampled_from([{}, {"maxLength": 4}, {"pattern": "^[a-z]+$"}]),
        dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
    )
    combined = _maybe(anyOf=few, oneOf=few, allOf=few).filter(bool) | inner.map(lambda schema: {"not": schema})
    condition = st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner})
    references = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}, {"$ref": "#"}])
    return _tagged("array", arrays) | _tagged("object", objects) | combined | condition | references


SCHEMAS = st.recursive(LEAVES, _nested, max_leaves=8)
ROOTS = st.tuples(SCHEMAS, SCHEMAS, SCHEMAS).map(
    lambda parts: parts[0] if isinstance(parts[0], bool) else parts[0] | {"$defs": {"one": parts[1], "two": parts[2]}}
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(ROOTS, st.integers(0, 2**64 - 1))
def test_whatever_is_made_is_valid(schema: Any, seed: int) -> None:
    try:
        value = json_value(schema, seed)
    except SynthesisError:
        return
    jsonschema.Draft202012Validator(schema).validate(value)
    assert json_value(schema, seed) == value, "deterministic"


def _schema_of(value: Any) -> dict[str, Any]:
    """A schema that `value` satisfies, so synthesis has no excuse."""
    if isinstance(value, dict):
        members = {key: _schema_of(member) for key, member in value.items()}
        return {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [_schema_of(item) for item in value] or [True], "minItems": len(value)}
    if isinstance(value, str):
        return {"type": "string", "minLength": len(value), "maxLength": len(value) + 1}
    if isinstance(value, bool) or value is None:
        return {"const": value}
    return {"type": "number", "minimum": value, "maximum": value + 1}


VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(VALUES, st.integers(0, 2**64 - 1))
def test_satisfiable_schemas_are_satisfied(value: Any, seed: int) -> None:
    schema = _schema_of(value)
    jsonschema.Draft202012Validator(schema).validate(json_value(schema, seed))


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SATISFIABLE = [
    TREE,
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
    {"allOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
    {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6},
    {"type": "string", "pattern": "^(a+)+$", "minLength": 300},
    {"type": "object", "minProperties": 5, "propertyNames": {"pattern": "^[a-c]{3}$"}},
    {"type": "array", "contains": {"const": "x"}, "items": {"type": "string"}, "minContains": 3},
    {"not": {"type": "string"}},
    {"if": {"type": "object"}, "then": {"required": ["k"]}, "type": "object"},
]


@pytest.mark.parametrize("schema", SATISFIABLE, ids=lambda schema: json.dumps(schema)[:50])
def test_hard_but_satisfiable(schema: Any) -> None:
    for seed in range(8):
        jsonschema.Draft202012Validator(schema).validate(json.loads(json_text(schema, seed)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"type": "string", "enum": [1]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "required": ["self"], "properties": {"self": {"$ref": "#"}}},
        {"type": "string", "pattern": "(["},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "array", "minItems": 10**9},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"properties": 5},
        {"unevaluatedProperties": False},
        False,
        [],
        "text",
    ],
    ids=str,
)
def test_impossible_or_wrong_schemas_are_an_error(schema: Any) -> None:
    with pytest.raises(SynthesisError):
        json_value(schema, 1)
