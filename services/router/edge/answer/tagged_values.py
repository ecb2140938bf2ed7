"""Arguments that a family writes between tags, each by itself: to JSON as they come, and as rules of a grammar.

A text stands there as it is, anything else as JSON. Which of the two a value is follows from its schema: `5` is a text
where the schema asks for one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.router.edge.answer.call_rules import CallRules, Rules, moved
from services.router.edge.answer.python_rules import FREE_NAME, NOTES, UnsupportedSchemaError, json_text
from shared.structure.grammar_text import json_schema

Schema = Mapping[str, Any]

_ALL = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_TEXT = frozenset(("string",))
_MAX_DEPTH = 16
"""References and alternatives within each other that are followed; what is deeper may be anything."""
_MAX_LOOKS = 32
"""Schemas that are looked at for the types of one argument; what is beyond may be anything. Others may share them."""
_MAX_LITERAL_LEN = 65_536
"""Characters of a list or dict that is tried as Python's literal."""
_DEFINITIONS = ("$defs", "definitions")
_WHOLE = "#/$defs/whole"
"""Place of all arguments' schema in that of one argument."""


class TaggedArguments:
    """Writes a call's arguments as one JSON object, whose texts come as they are read."""

    def __init__(self, schema: Schema, write: Callable[[str], None], *, trims: bool = False) -> None:
        """`schema`: of all arguments; `trims`: a line end behind the opening tag and one before the closing tag are
        the tags' own."""
        self._schema, self._write, self._trims = schema, write, trims
        self._types = _ALL
        self._read: list[str] = []  # of a value that is no text, or of a text's held line end
        self._is_new = True
        self._num_written = 0
        write("{")

    def begin(self, name: str) -> None:
        """A value follows."""
        self._types = _types_of_argument(self._schema, name)
        self._read.clear()
        self._is_new = True
        self._write(f"{', ' if self._num_written else ''}{json_text(name)}: ")
        if self._types == _TEXT:
            self._write('"')
        self._num_written += 1

    def add(self, text: str) -> None:
        """Adds text to the value."""
        if self._types != _TEXT:
            self._read.append(text)
            return
        if self._trims:
            if self._is_new and text:
                self._is_new = False
                text = text.removeprefix("\n")
            text = "".join(self._read) + text
            kept = text.removesuffix("\n")
            self._read = [text[len(kept) :]]
            text = kept
        self._write(json_text(text)[1:-1])

    def end(self) -> None:
        """The value is over."""
        if self._types == _TEXT:
            self._write('"')
            return
        text = "".join(self._read)
        if self._trims:
            text = text.removeprefix("\n").removesuffix("\n")
        self._write(_value(text, self._types))

    def close(self) -> None:
        """The call is over."""
        self._write("}")


def _value(text: str, types: frozenset[str]) -> str:
    """A value's JSON; a text where it is nothing else that its schema allows."""
    stripped = text.strip()
    try:
        if _is_of(json.loads(stripped, parse_constant=_refuse), types):
            return stripped
    except (ValueError, RecursionError):
        pass
    try:
        if stripped in ("True", "False", "None") or (stripped[:1] in ("[", "{") and len(stripped) <= _MAX_LITERAL_LEN):
            literal = ast.literal_eval(stripped)
            if _is_of(literal, types):
                # Python keeps both halves of a character beyond 16 bits apart where they are two escapes.
                halves = json.dumps(literal, ensure_ascii=False, allow_nan=False).encode("utf-16", "surrogatepass")
                return halves.decode("utf-16", "replace")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return json_text(text)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _is_of(value: object, types: frozenset[str]) -> bool:
    match value:
        case bool():
            return "boolean" in types
        case None:
            return "null" in types
        case int():
            return not types.isdisjoint(("integer", "number"))
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case list():
            return "array" in types
        case dict():
            return "object" in types
    return False  # a text in quotation marks is a text with quotation marks


def _types_of_argument(schema: Schema, name: str) -> frozenset[str]:
    schema = _resolved(schema, schema)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _Types(schema).of(properties[name])
    return _Types(schema).of(schema.get("additionalProperties", True))


class _Types:
    """What one argument's values may be, as far as their schemas say so. Each reference is followed once."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._by_reference: dict[str, frozenset[str]] = {}
        self._num_looks = 0

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a schema allows; all where it is none."""
        self._num_looks += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._num_looks > _MAX_LOOKS:
            return _ALL
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._by_reference:
                self._by_reference[reference] = _ALL  # for one that leads back to itself
                self._by_reference[reference] = self.of(_target(reference, self._root), depth + 1)
            return self._by_reference[reference]
        if "const" in schema or isinstance(schema.get("enum"), list):
            return _types_of_values(schema["enum"] if "enum" in schema else [schema["const"]])
        found = _ALL
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found = frozenset(name for name in names if isinstance(name, str)) or _ALL
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            if not isinstance(parts, list) or len(parts) > _MAX_LOOKS - self._num_looks:
                continue
            each = [self.of(part, depth + 1) for part in parts]
            found = found.intersection(*each) if keyword == "allOf" else found & frozenset[str]().union(*each)
        return found


def _types_of_values(values: Iterable[object]) -> frozenset[str]:
    found: set[str] = set()
    for value in values:
        if isinstance(value, str):
            found.add("string")
        found |= {name for name in _ALL if _is_of(value, frozenset((name,)))}
    return frozenset(found)


def _target(reference: Any, root: Schema) -> Any:
    """What a reference within the schema names; True where there is no such thing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: Any = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return True
        found = found[part]
    return found


def _resolved(schema: Schema, root: Schema) -> Schema:
    """The schema itself, where it refers to a definition; with the definitions."""
    for _ in range(_MAX_DEPTH):
        if "$ref" not in schema:
            break
        target = _target(schema["$ref"], root)
        if not isinstance(target, Mapping):
            break
        schema = {**{key: root[key] for key in _DEFINITIONS if key in root}, **target}
    return schema


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around a value in a grammar, as symbols of Lark."""

    begin: Callable[[str], str]
    """Before a value, from the symbol of its name."""
    line_end: str
    """Between a value that is no text and the closing tag."""
    end: str
    """The closing tag, as text."""
    end_symbol: str
    behind: str
    """Between the closing tag and the next argument."""

    @property
    def terminals(self) -> str:
        """Rules that the rules of arguments need: any text, and any without the closing tag."""
        closing = self.end.replace("/", "\\/")
        return f"ANY: /(.|\\n)*/\nOPEN: ANY & ~/(.|\\n)*{closing}(.|\\n)*/\n"


def tagged_grammar(rules: CallRules, tags: Tags, one: str, named: Callable[[str, str], str]) -> str:
    """A grammar of calls, see `CallGrammar`: `one` is a call around its `tool`, `named` joins a tool's name and its
    arguments."""
    tool = rules.by_schema(lambda prefix, schema: TaggedRules(prefix, schema, tags), named)
    return f"calls: {rules.repeated('one')}\none: {one}\n{tool}{tags.terminals}"


class TaggedRules:
    """The rules of one tool's arguments. Rules are named `PREFIX_0`, `PREFIX_1`, …"""

    def __init__(self, prefix: str, schema: Schema, tags: Tags) -> None:
        """`schema`: of the arguments, an object's."""
        self._prefix, self._schema, self._tags = prefix, _resolved(schema, schema), tags
        self._rules = Rules("arguments whose rules")  # each argument may repeat all definitions
        self._open = set[str]()  # references that `_check_is_open` has followed

    @property
    def text(self) -> str:
        """The text of all rules made until now."""
        return "".join(self._rules)

    def arguments(self) -> str:
        """The symbols of all arguments, in the schema's order. Raises UnsupportedSchemaError."""
        properties = dict(self._schema.get("properties") or {})
        other = self._schema.get("additionalProperties", not properties)
        required = set(self._schema.get("required") or ())
        for missing in required - properties.keys():
            if other is False:
                raise UnsupportedSchemaError(f"required {json_text(missing)}, which no property is")
            properties[missing] = other
        for name in properties:
            if name != name.strip() or not name or any(sign in "<>\n" for sign in name):
                raise UnsupportedSchemaError(f"property {json_text(name)}, which cannot stand in a tag")
        symbols = [
            f"{self._argument(json_text(name), schema)}{'' if name in required else '?'}"
            for name, schema in properties.items()
        ]
        if other is not False:
            symbols.append(f"{self._argument(self._add(f'/{FREE_NAME}/'), other)}*")
        return " ".join(symbols) or '""'

    def _argument(self, name: str, schema: Any) -> str:
        return self._add(f"{self._tags.begin(name)} {self._value(schema)} {self._tags.behind}")

    def _value(self, schema: Any) -> str:
        """A value and its closing tag."""
        tags, given = self._tags, schema
        if isinstance(schema, Mapping):
            schema = _resolved(schema, self._schema)
        if "string" in _Types(self._schema).of(schema):
            values = _listed(schema)
            if values is None:
                self._check_is_open(given)
                return self._text()
            written = " | ".join(json_text(value if isinstance(value, str) else json_text(value)) for value in values)
        else:
            compact = {**moved(schema, _WHOLE), "x-guidance": {"whitespace_flexible": False}}
            if '"$ref"' in json_text(schema):
                compact["$defs"] = {"whole": moved(self._schema, _WHOLE)}
            written = f"%json {json_text(json_schema(compact))}"
        return f"{self._add(written)} {tags.line_end} {tags.end_symbol}"

    def _text(self) -> str:
        """Any text up to its closing tag, which may be a token or characters."""
        tags = self._tags
        spelled = self._add("ANY", f"[suffix={json_text(tags.end)}]")
        return f"({spelled} | OPEN {tags.end_symbol})" if tags.end_symbol.startswith("<[") else spelled

    def _check_is_open(self, schema: Any) -> None:
        """Raises UnsupportedSchemaError for a keyword that forbids more than types. Each reference is followed once for
        all arguments."""
        if not isinstance(schema, Mapping):
            return
        for keyword, value in schema.items():
            if keyword == "$ref":
                if isinstance(value, str) and value not in self._open:
                    self._open.add(value)
                    self._check_is_open(_target(value, self._schema))
            elif keyword in ("anyOf", "oneOf"):
                for one in value:
                    self._check_is_open(one)
            elif keyword != "type" and keyword not in NOTES:
                raise UnsupportedSchemaError(keyword)

    def _add(self, rule: str, attributes: str = "") -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {rule}\n")
        return name


def _listed(schema: Any) -> list[Any] | None:
    """The values that a schema lists, if it does."""
    if not isinstance(schema, Mapping) or not schema.keys() <= NOTES | {"type", "enum", "const"}:
        return None
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None
