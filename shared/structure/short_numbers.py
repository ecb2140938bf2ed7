"""JSON Schemas whose numbers end: a weak model would else write digits to the end of its answer."""

from __future__ import annotations

from typing import Any

LARGEST_INTEGER = 10**18
"""Largest absolute value of an integer, where the schema has no bound on that side."""
LARGEST_DECIMAL = 10**9
"""Largest absolute value of a number with a fraction, where the schema has no bound on that side."""
SMALLEST_STEP = 1e-9
"""Smallest step of a number with a fraction: nine digits behind the point."""

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name."""
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_ONE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "not", "if")
_ALSO_ONE = ("then", "else", "propertyNames", "additionalItems")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OWN = frozenset((*_LOWER, *_UPPER, "multipleOf", "enum", "const", "$ref"))
"""Keywords by which a schema bounds its numbers."""


def with_short_numbers(schema: Any) -> Any:
    """The schema, in which a number takes at most 20 digits wherever its type is named and its bounds are not.

    An integer lies within 10**18 on a side without a bound. A number is such an integer, or lies within 10**9 with at
    most nine digits behind the point. A number with a bound, a step or listed values stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    short = dict(schema)
    for key in SCHEMA_MAPS:
        if isinstance(parts := short.get(key), dict):
            short[key] = {name: with_short_numbers(part) for name, part in parts.items()}
    for key in _LISTS:
        if isinstance(parts := short.get(key), list):
            short[key] = [with_short_numbers(part) for part in parts]
    for key in (*_ONE, *_ALSO_ONE):
        if isinstance(part := short.get(key), dict):
            short[key] = with_short_numbers(part)
    types = short.get("type")
    named = types if isinstance(types, list) else [types]
    if "number" in named:
        return _short_number(short, named)
    return _short_integer(short) if "integer" in named else short


def any_object() -> dict[str, Any]:
    """The schema of every JSON object, which names the types of all its values."""
    value = {"$ref": "#/$defs/value"}
    parts = {
        "type": ["object", "array", "string", "number", "boolean", "null"],
        "additionalProperties": value,
        "items": value,
    }
    return {"type": "object", "additionalProperties": value, "$defs": {"value": parts}}


def _short_integer(schema: dict[str, Any]) -> dict[str, Any]:
    if not schema.keys().isdisjoint(("enum", "const", "$ref", "multipleOf")):
        return schema
    bounds = [schema[key] for key in (*_LOWER, *_UPPER) if isinstance(schema.get(key), int | float)]
    if any(abs(bound) >= LARGEST_INTEGER for bound in bounds):
        return schema
    sides = ((_LOWER, "minimum", -LARGEST_INTEGER), (_UPPER, "maximum", LARGEST_INTEGER))
    return {**schema, **{name: bound for keys, name, bound in sides if schema.keys().isdisjoint(keys)}}


def _short_number(schema: dict[str, Any], types: list[Any]) -> dict[str, Any]:
    if "anyOf" in schema or not schema.keys().isdisjoint(_OWN):
        return schema
    decimals = {"minimum": -LARGEST_DECIMAL, "maximum": LARGEST_DECIMAL, "multipleOf": SMALLEST_STEP}
    ways: list[dict[str, Any]] = [_short_integer({"type": "integer"}), {"type": "number", **decimals}]
    others = [name for name in types if name not in ("number", "integer")]
    if others:
        ways.append({"type": others})
    return {**schema, "anyOf": ways}
