"""A JSON schema as rules of a grammar (llguidance's Lark) for Python's literals: what the calls of some families are
made of.

The rules say no more than the schema: whatever follows them is an instance of it once it is read as JSON. Where they
would say less than a schema asks for (a keyword that is not here) the schema is refused by that keyword's name. Texts
and numbers are llguidance's own, from the schema: it writes such JSON alone as Python reads alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]

NOTES = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"}
    | {"readOnly", "title", "writeOnly", "x-guidance"}
)
"""Keywords that forbid nothing."""
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_DEFINITIONS = ("#/$defs/", "#/definitions/")
_QUOTED = r"""'([^'\\\x00-\x1f\x7f]|\\['"\\bfnrt])%s'"""
"""A text in Python's other quotation marks; how many characters is left open."""
_NUMBERS = {
    "integer": "-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?",
}
"""Such as a float holds: a longer exponent is infinite in Python, which JSON has no word for."""
FREE_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
COMMA = '"," " "?'
"""Between arguments, items and calls."""
ARGUMENT_NAME = r"""[^\s=,()\[\]{}'"\\#*]+"""
"""Regular expression of an argument's name, before its `=`."""


class UnsupportedSchemaError(ValueError):
    """The schema has a keyword or value that these rules do not support; the message names it."""


class PythonRules:
    """The rules of one tool's arguments. Rules are named `PREFIX_0`, `PREFIX_1`, …"""

    def __init__(self, prefix: str, schema: Schema) -> None:
        """`schema`: of the arguments, an object's."""
        self._prefix, self._root = prefix, schema
        self._rules: list[str] = []
        self._by_reference: dict[str, str] = {}
        self._anything = ""

    @property
    def text(self) -> str:
        """The text of all rules made until now."""
        return "".join(f"{self._prefix}_{number}: {rule}\n" for number, rule in enumerate(self._rules))

    def arguments(self) -> str:
        """The symbol of `name=value, …`. Raises UnsupportedSchemaError."""
        return self._object(self._resolved(self._root), _argument, _argument_name)

    def _value(self, schema: Any) -> str:
        """The symbol of a value."""
        if schema is True or (isinstance(schema, Mapping) and schema.keys() <= NOTES):
            return self._any()
        if not isinstance(schema, Mapping):
            raise UnsupportedSchemaError(f"{json.dumps(schema)} in place of a schema")
        if "$ref" in schema:
            return self._referred(schema)
        if "const" in schema or "enum" in schema:
            return self._one_of_these(schema)
        for keyword in ("anyOf", "allOf"):
            if keyword in schema:
                _only(schema, {keyword})
                if keyword == "allOf" and len(schema[keyword]) != 1:
                    raise UnsupportedSchemaError("allOf")
                return self._add(" | ".join(map(self._value, schema[keyword])))
        types = _types(schema)
        _only(schema, {"type"}.union(*(_OF_TYPE[name] for name in types)))
        return self._add(" | ".join(self._typed(name, schema) for name in types))

    def _typed(self, name: str, schema: Schema) -> str:
        own = {key: value for key, value in schema.items() if key in _OF_TYPE[name]}
        match name:
            case "boolean":
                return '"True" | "False"'
            case "null":
                return '"None"'
            case "array":
                return self._array(own)
            case "object":
                return f'"{{" {self._object(own, _entry, _key)} "}}"'
            case "integer" | "number" if not own:
                return f"/{_NUMBERS[name]}/"
            case _:
                written = f"%json {json_text({'type': name, **own, 'x-guidance': {'whitespace_flexible': False}})}"
                return f"{self._add(written)}{self._quoted(own) if name == 'string' else ''}"

    def _quoted(self, text: Schema) -> str:
        if text.keys() & {"pattern", "format"}:
            return ""
        count = f"{{{text.get('minLength', 0)},{text.get('maxLength', '')}}}"
        return f" | /{_QUOTED % count}/"

    def _array(self, schema: Schema) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._value(schema.get("items", True))
        more = f"({COMMA} {item}){{{max(0, fewest - 1)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {more} "]"' if fewest else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Schema, pair: Callable[[str, str], str], name: Callable[[str], str]) -> str:
        """Properties in their order, those that may be left out at will."""
        _only(schema, _OF_TYPE["object"] | {"type"})
        properties = dict(schema.get("properties") or {})
        other = schema.get("additionalProperties", not properties)
        required = set(schema.get("required", ()))
        for missing in required - properties.keys():
            if other is False:
                raise UnsupportedSchemaError(f"required {json.dumps(missing)}, which no property is")
            properties[missing] = other
        # Behind a first property, and where none is written yet.
        behind = began = '""'
        if other is not False:
            any_name = f"/{FREE_NAME}/" if pair is _argument else self._typed("string", {})
            one = self._add(pair(self._add(any_name), self._value(other)))
            behind = self._add(f"({COMMA} {one})*")
            began = self._add(f'({one} {behind} | "")')
        for key in reversed(properties):
            one = self._add(pair(name(key), self._value(properties[key])))
            if key in required:
                began, behind = self._add(f"{one} {behind}"), self._add(f"{COMMA} {one} {behind}")
            else:
                began = self._add(f"{one} {behind} | {began}")
                behind = self._add(f"({COMMA} {one})? {behind}")
        return began

    def _one_of_these(self, schema: Schema) -> str:
        _only(schema, {"const", "enum", "type"})
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        if "type" in schema:
            allowed = tuple(kind for name in _types(schema) for kind in _TYPES[name])
            values = [v for v in values if isinstance(v, allowed) and (not isinstance(v, bool) or bool in allowed)]
        if not values:
            raise UnsupportedSchemaError("enum that allows no value")
        return self._add(" | ".join(json_text(text) for value in values for text in _literals(value)))

    def _referred(self, schema: Schema) -> str:
        _only(schema, {"$ref"})
        reference = schema["$ref"]
        known = self._by_reference.get(reference)
        if known is None:
            known, number = self._reserve()  # for a schema that refers to itself
            self._by_reference[reference] = known
            self._rules[number] = self._value(self._target(reference))
        return known

    def _target(self, reference: Any) -> Any:
        if reference == "#":
            return self._root
        for prefix in _DEFINITIONS:
            if isinstance(reference, str) and reference.startswith(prefix):
                definitions = self._root.get(prefix.strip("#/")) or {}
                name = reference.removeprefix(prefix).replace("~1", "/").replace("~0", "~")
                if name in definitions:
                    return definitions[name]
        raise UnsupportedSchemaError(f"$ref {json.dumps(reference)}")

    def _resolved(self, schema: Schema) -> Schema:
        """The arguments' schema itself, where the tool's refers to a definition."""
        seen: set[str] = set()
        while "$ref" in schema and schema["$ref"] not in seen:
            _only(schema, {"$ref"})
            seen.add(schema["$ref"])
            schema = self._target(schema["$ref"])
        return {key: value for key, value in schema.items() if key not in NOTES}

    def _any(self) -> str:
        """Any literal."""
        if not self._anything:
            self._anything, number = self._reserve()
            one = self._anything
            listed = f'"[" ({one} ({COMMA} {one})*)? "]"'
            entry = _entry(self._add(self._typed("string", {})), one)
            mapped = f'"{{" ({entry} ({COMMA} {entry})*)? "}}"'
            plain = [self._typed(name, {}) for name in ("string", "number", "boolean", "null")]
            self._rules[number] = " | ".join((*plain, listed, mapped))
        return self._anything

    def _reserve(self) -> tuple[str, int]:
        """The symbol and number of a rule that is still to be made."""
        return self._add(""), len(self._rules) - 1

    def _add(self, rule: str) -> str:
        self._rules.append(rule)
        return f"{self._prefix}_{len(self._rules) - 1}"


def _argument(name: str, value: str) -> str:
    return f'{name} "=" {value}'


def _entry(key: str, value: str) -> str:
    return f'{key} ":" " "? {value}'


def _argument_name(name: str) -> str:
    if re.fullmatch(ARGUMENT_NAME, name) is None:
        raise UnsupportedSchemaError(f"property {json.dumps(name)}, which is no name of an argument")
    return json_text(name)


def _key(name: str) -> str:
    return f"({' | '.join(map(json_text, _literals(name)))})"


def _types(schema: Schema) -> list[str]:
    """The types that the schema names, or else those that its keywords are about."""
    named = schema.get("type")
    if named is None:
        found = [name for name, own in _OF_TYPE.items() if name != "integer" and own & schema.keys()]
    else:
        found = [named] if isinstance(named, str) else list(named)
    for name in found:
        if name not in _OF_TYPE:
            raise UnsupportedSchemaError(f"type {json.dumps(name)}")
    return found


def _only(schema: Schema, allowed: Iterable[str]) -> None:
    if others := sorted(schema.keys() - NOTES - set(allowed)):
        raise UnsupportedSchemaError(others[0])


def _literals(value: Any) -> list[str]:
    """How Python writes a value of JSON: a text in either marks."""
    if isinstance(value, str):
        double = json_text(value)
        return [double, f"'{value}'"] if double == f'"{value}"' and "'" not in value else [double]
    return [repr(value)]


def json_text(value: object) -> str:
    """As JSON; letters beyond ASCII stand for themselves."""
    return json.dumps(value, ensure_ascii=False)
