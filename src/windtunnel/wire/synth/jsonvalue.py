"""A JSON value for a schema, deterministic from (seed, schema), always valid against it.

Candidates are built by construction (combinations are merged into one schema first) and then judged by `Validator`; the
first valid one is the answer. Everything is bounded: tries, depth, steps. What cannot be satisfied within those bounds is a
SynthesisError.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from windtunnel.core.words import WORDS
from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.merge import Impossible, merge
from windtunnel.wire.synth.numbers import number
from windtunnel.wire.synth.regex import compiled
from windtunnel.wire.synth.schema import check_schema
from windtunnel.wire.synth.strings import string
from windtunnel.wire.synth.validate import TYPES, Schema, Validator, equal, extras

MAX_TRIES = 48
MAX_STEPS = 30_000
SHALLOW, DEEP = 4, 24
"""Beyond `SHALLOW` only what is required is made; beyond `DEEP` nothing is."""


def json_value(schema: Schema, seed: int) -> Any:
    """Raises SynthesisError for a schema that is wrong, unsatisfiable or not supported."""
    check_schema(schema)
    validator = Validator(schema)
    maker = _Maker(validator, seed)
    for _ in range(MAX_TRIES):
        try:
            value = maker.make(schema, 0)
        except Impossible:
            continue
        if validator.valid(value, schema):
            return value
    raise SynthesisError("Grammar error: Unsatisfiable schema")


def json_text(schema: Schema, seed: int, *, top_level_object: bool = False) -> str:
    """The value as text. `top_level_object` refuses schemas whose value is no object (tool arguments)."""
    value = json_value(schema, seed)
    if top_level_object and not isinstance(value, dict):
        raise SynthesisError("Grammar error: the parameters of a tool must describe an object")
    return json.dumps(value, ensure_ascii=False)


class _Maker:
    """Builds candidates. Mutable: its choices and the steps that are left."""

    def __init__(self, validator: Validator, seed: int) -> None:
        self._validator = validator
        self._draw = Draw(seed)
        self._steps = MAX_STEPS

    def make(self, schema: Schema, depth: int) -> Any:
        """One candidate for `schema`. Raises Impossible when this attempt leads nowhere."""
        self._steps -= 1
        if self._steps < 0:
            raise SynthesisError("Grammar error: the schema is too complex")
        if depth > DEEP or schema is False:
            raise Impossible
        flat = self._flat({} if schema is True else schema, depth)
        if "const" in flat:
            return flat["const"]
        if "enum" in flat:
            return self._one_of(flat)
        return self._typed(flat, depth)

    def _flat(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """The schema with its combinations decided and merged in."""
        if depth > DEEP:
            raise Impossible
        base = {key: value for key, value in schema.items() if key not in _COMBINED}
        for part in self._parts(schema, depth):
            base = merge(base, self._flat(_opened(part), depth + 1))
        return base

    def _parts(self, schema: Mapping[str, Any], depth: int) -> Iterator[Schema]:
        if "$ref" in schema:
            self._steps -= 1
            yield self._validator.resolve(schema["$ref"])
        yield from schema.get("allOf", ())
        for name in ("anyOf", "oneOf"):
            if name in schema:
                yield self._branch(schema[name], depth)
        if "if" in schema:
            yield from self._condition(schema)

    def _branch(self, branches: list[Schema], depth: int) -> Schema:
        """Deep down the simplest branch is likelier, so that recursion ends."""
        if depth > SHALLOW and self._draw.below(8):
            return min(branches, key=_weight)
        return branches[self._draw.below(len(branches))]

    def _condition(self, schema: Mapping[str, Any]) -> Iterator[Schema]:
        if self._draw.below(2):
            yield from (schema["if"], schema.get("then", True))
        else:
            yield schema.get("else", True)

    def _one_of(self, flat: Mapping[str, Any]) -> Any:
        rest = {key: value for key, value in flat.items() if key != "enum"}
        fits = [value for value in flat["enum"] if self._validator.valid(value, rest)]
        if not fits:
            raise Impossible
        return fits[self._draw.below(len(fits))]

    def _typed(self, flat: Mapping[str, Any], depth: int) -> Any:
        wanted = flat.get("type", _implied(flat))
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        simple = [name for name in names if name not in ("array", "object")]
        pool = simple if depth > SHALLOW and simple else names
        name = pool[self._draw.below(len(pool))]
        if name == "null":
            return None
        if name == "boolean":
            return bool(self._draw.below(2))
        if name in ("integer", "number"):
            return number(flat, self._draw, integer=name == "integer")
        if name == "string":
            return string(flat, self._draw)
        return self._array(flat, depth) if name == "array" else self._object(flat, depth)

    def _array(self, flat: Mapping[str, Any], depth: int) -> list[Any]:
        prefix = flat.get("prefixItems", [])
        low, high = flat.get("minItems", 0), flat.get("maxItems")
        count = low if depth > SHALLOW else max(low, len(prefix), low + self._draw.below(3))
        count = max(count, flat.get("minContains", 1)) if "contains" in flat else count
        count = count if high is None else min(count, high)
        if count < low:
            raise Impossible
        out: list[Any] = []
        wanted = flat.get("minContains", 1) if "contains" in flat else 0
        for at in range(count):
            schema = prefix[at] if at < len(prefix) else flat.get("items", True)
            contained = wanted > 0 and (at >= len(prefix) or count - at <= wanted)
            out = self._appended(out, [schema, flat["contains"]] if contained else [schema], flat, depth, low)
            wanted -= contained
        return out

    def _appended(self, out: list[Any], schemas: list[Schema], flat: Mapping[str, Any], depth: int, low: int) -> list[Any]:
        """One more item, different from the others where it must be; an optional one is left out when none is found."""
        whole: Schema = {"allOf": schemas} if len(schemas) > 1 else schemas[0]
        for _ in range(24 if flat.get("uniqueItems") else 4):
            try:
                item = self.make(whole, depth + 1)
            except Impossible:
                continue
            if self._validator.valid(item, whole) and not (flat.get("uniqueItems") and any(equal(item, o) for o in out)):
                return [*out, item]
        if len(out) < low or len(schemas) > 1:
            raise Impossible
        return out

    def _object(self, flat: Mapping[str, Any], depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in self._keys(flat, depth):
            self._set(out, key, flat, depth)
        tries = 0
        while len(out) < flat.get("minProperties", 0):
            tries += 1
            if tries > 200:
                raise Impossible
            self._set(out, self._new_key(flat), flat, depth)
        for key, more in flat.get("dependentRequired", {}).items():
            for name in more if key in out else ():
                self._set(out, name, flat, depth)
        for key, more in flat.get("dependentSchemas", {}).items():
            if key in out:
                out = self._object(
                    merge(_without(flat, "dependentSchemas", key), self._flat(_opened(more), depth + 1)), depth + 1
                )
        return out

    def _keys(self, flat: Mapping[str, Any], depth: int) -> list[str]:
        required = flat.get("required", [])
        known = flat.get("properties", {})
        room = flat.get("maxProperties", len(known) + len(required)) - len(set(required))
        keys = []
        for key in known:
            optional = key not in required
            if optional and (depth > SHALLOW or room <= 0 or known[key] is False or self._draw.below(4) == 0):
                continue
            room -= optional
            keys.append(key)
        return keys + [key for key in required if key not in known]

    def _set(self, out: dict[str, Any], key: str, flat: Mapping[str, Any], depth: int) -> None:
        if key in out:
            return
        required = key in flat.get("required", ())
        whole = _member_schema(key, flat)
        for _ in range(6):
            try:
                value = self.make(whole, depth + 1)
            except Impossible:
                continue
            if self._validator.valid(value, whole):
                out[key] = value
                return
        if required:
            raise Impossible

    def _new_key(self, flat: Mapping[str, Any]) -> str:
        names: list[str] = list(flat.get("properties", {}))
        patterns = list(flat.get("patternProperties", ()))
        kind = self._draw.below(3)
        if kind == 0 and names:
            return names[self._draw.below(len(names))]
        if kind == 1 and patterns:
            return compiled(patterns[self._draw.below(len(patterns))]).text(self._draw)
        if "propertyNames" in flat:
            name = self.make({"allOf": [{"type": "string"}, flat["propertyNames"]]}, DEEP - 2)
            return str(name)
        return f"{WORDS[self._draw.below(len(WORDS))]}{self._draw.below(1000)}"


_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "$defs", "definitions"})


def _weight(schema: Schema) -> int:
    """How much a schema asks for; references weigh most, because they may be recursive."""
    return len(json.dumps(schema, default=str)) + 10_000 * ("$ref" in json.dumps(schema, default=str))


def _implied(flat: Mapping[str, Any]) -> list[str]:
    """The type that an untyped schema is about; a string when it says nothing."""
    hints = {
        "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "propertyNames"),
        "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
    found = [name for name, keys in hints.items() if any(key in flat for key in keys)]
    return found or (["string"] if "not" not in flat else list(TYPES))


def _member_schema(key: str, flat: Mapping[str, Any]) -> Schema:
    parts = [flat["properties"][key]] if key in flat.get("properties", {}) else []
    parts += [schema for pattern, schema in flat.get("patternProperties", {}).items() if compiled(pattern).search(key)]
    if extras({key: None}, flat):
        parts.append(flat.get("additionalProperties", True))
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _without(flat: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    rest = {other: schema for other, schema in flat[name].items() if other != key}
    required = list(dict.fromkeys([*flat.get("required", ()), key]))
    return {**flat, name: rest, "required": required}


def _opened(schema: Schema) -> Mapping[str, Any]:
    if schema is False:
        raise Impossible
    return {} if schema is True else schema
