"""Random JSON Schemas whose answers are finite: of every string, number and array the largest size is given."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-z]{1,6}$", "^(red|green|blue)-[0-9]{2}$", "^[A-Z][a-z]{0,4}( [A-Z][a-z]{0,4})?$", "^\\d{3}-\\d{4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
NAMES = ("id", "name", "größe", "with space", 'quoted "name"', "tags", "x", "价格", "nested", "a/b", "$ref-like", "")
WORDS = ("red", "green", 'say "hi"', "tab\there", "ü", "日本", "", "null", "a\\b")


def random_schema(seed: int) -> Schema:
    """One schema, a function of its seed: mostly an object, of up to three levels, with a definition that it uses.

    Half of them ask for compact JSON, the others for whitespace of up to three characters between parts.
    """
    choose = Random(seed)
    schema = _object(choose, 3) if choose.random() < 0.8 else _any(choose, 3)
    if choose.random() < 0.3 and schema.get("type") == "object":
        schema["$defs"] = {"part": _any(choose, 1)}
        schema["properties"]["of a definition"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema.get("required", ()), "of a definition"]
    spaced: Schema = {"whitespace_pattern": "[ \\n\\t]{1,3}"}
    schema["x-guidance"] = spaced if seed % 2 else {"whitespace_flexible": False}
    return schema


def _any(choose: Random, depth: int) -> Schema:
    if depth > 0 and choose.random() < 0.4:
        return choose.choice((_object, _object, _array, _array, _union))(choose, depth)
    return choose.choice((_string, _string, _integer, _number, _enum, _constant, _simple))(choose)


def _object(choose: Random, depth: int) -> Schema:
    names = choose.sample(NAMES, choose.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(choose, depth - 1) for name in names},
        "additionalProperties": False,
    }
    required = [name for name in names if choose.random() < 0.6]
    if required or choose.random() < 0.5:
        schema["required"] = required
    return schema


def _array(choose: Random, depth: int) -> Schema:
    least = choose.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(choose, depth - 1), "maxItems": least + choose.randint(0, 2)}
    if least:
        schema["minItems"] = least
    if choose.random() < 0.2:
        schema["prefixItems"] = [_any(choose, 0)]
    return schema


def _union(choose: Random, depth: int) -> Schema:
    return {"anyOf": [_any(choose, depth - 1) for _ in range(choose.randint(2, 3))]}


def _string(choose: Random) -> Schema:
    kind = choose.random()
    if kind < 0.25:
        return {"type": "string", "pattern": choose.choice(PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": choose.choice(FORMATS)}
    least = choose.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + choose.randint(0, 9)}


def _integer(choose: Random) -> Schema:
    low = choose.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + choose.choice((0, 1, 9, 100, 12345))}


def _number(choose: Random) -> Schema:
    low = choose.choice((-2.5, -1.0, 0, 0.25))
    ends = ("exclusiveMinimum", "exclusiveMaximum") if choose.random() < 0.3 else ("minimum", "maximum")
    return {"type": "number", ends[0]: low, ends[1]: low + choose.choice((1, 2.5, 40))}


def _enum(choose: Random) -> Schema:
    return {"enum": choose.sample([*WORDS, 0, -1, 2.5, True, None], choose.randint(1, 4))}


def _constant(choose: Random) -> Schema:
    return {"const": choose.choice([*WORDS, 7, False, None])}


def _simple(choose: Random) -> Schema:
    return {"type": choose.choice(["boolean", "null", ["boolean", "null"]])}
