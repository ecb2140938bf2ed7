"""Tool calls as rules of a grammar (llguidance's Lark), for answers that are calls or match something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.edge.answer.python_rules import UnsupportedSchemaError, json_text
from shared.structure.structured_output import MAX_STRUCTURE_BYTES


class ArgumentRules(Protocol):
    """The rules of one tool's arguments."""

    @property
    def text(self) -> str:
        """The text of all rules made until now."""

    def arguments(self) -> str:
        """The symbol of all arguments. Raises UnsupportedSchemaError."""


class Rules(list[str]):
    """Texts of rules. Many large ones are refused before all are made: that takes seconds."""

    def __init__(self, what: str) -> None:
        """`what` they are, plural, for the error."""
        super().__init__()
        self._what, self._num_chars = what, 0

    def append(self, rule: str) -> None:
        """Raises UnsupportedSchemaError where they are longer than a structure may be."""
        super().append(rule)
        self._num_chars += len(rule)
        if self._num_chars > MAX_STRUCTURE_BYTES:
            raise UnsupportedSchemaError(f"{self._what} take more than {MAX_STRUCTURE_BYTES} bytes")


OF_ALL_TOOLS = "the rules of all tools"


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a format makes its rules of. `BLANKS`, some whitespace, is a symbol that each may use."""

    mark: Callable[[str], str]
    """Turns a mark into a symbol: the one token that it is, or its characters."""
    call: Callable[[str], str]
    """What matches the JSON object of any tool's call; the argument names its field for arguments."""
    arguments: Callable[[Mapping[str, Any]], str]
    """What matches the JSON object of arguments of a schema."""
    schemas: Mapping[str, Mapping[str, Any]]
    """A tool's schema of its arguments, by its name."""
    many: bool
    """Whether there may be more than one call."""

    def repeated(self, one: str, between: str = "BLANKS?") -> str:
        """One call, or several with something between them."""
        return f"{one} ({between} {one})*" if self.many else one

    def by_tool(self, rule: str, one: Callable[[str, str], str]) -> str:
        """A rule with an alternative for each tool: `one` of its name and its arguments, both as symbols. Raises
        UnsupportedSchemaError."""
        alternatives, rules = [], Rules(OF_ALL_TOOLS)
        for number, (name, schema) in enumerate(self.schemas.items()):
            alternatives.append(one(json_text(name), f"{rule}_{number}"))
            rules.append(f"{rule}_{number}: {self.arguments(schema)}\n")
        return f"{rule}: {' | '.join(alternatives)}\n{''.join(rules)}"

    def by_schema(self, made: Callable[[str, Mapping[str, Any]], ArgumentRules], one: Callable[[str, str], str]) -> str:
        """The rule `tool` with an alternative for each tool, whose arguments are no JSON. `made`: of a prefix for names
        of rules and a schema; `one`: of a tool's name and its arguments, as symbols. Raises UnsupportedSchemaError."""
        alternatives, rules = [], Rules(OF_ALL_TOOLS)
        for number, (name, schema) in enumerate(self.schemas.items()):
            arguments, symbol = made(f"tool_{number}", schema), json_text(name)
            try:
                alternatives.append(one(symbol, arguments.arguments()))
            except UnsupportedSchemaError as error:
                raise UnsupportedSchemaError(f"tool {symbol}: {error}") from None
            except (TypeError, AttributeError, ValueError):
                raise UnsupportedSchemaError(f"tool {symbol}: what is no schema") from None
            rules.append(arguments.text)
        return f"tool: {' | '.join(alternatives)}\n{''.join(rules)}"


CallGrammar = Callable[[CallRules], str]
"""The rule `calls`, which matches all calls of an answer as a family writes them, and the rules that it needs. Raises
UnsupportedSchemaError."""


def moved(schema: Any, place: str) -> Any:
    """A schema, or a part of one, with its references to what they name now that the whole stands at `place` of
    another schema: `#/$defs/0`."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        parts["$ref"] = f"{place}{reference.removeprefix('#')}"
    return parts
