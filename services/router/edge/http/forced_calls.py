"""The JSON Schema that holds an answer to tool calls, where `tool_choice` says that there must be some."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.router.edge.answer.reader import ToolUse
from services.router.edge.http.chat_messages import Tool
from services.router.edge.http.structure_fields import closed
from shared.engine.structured_output import StructuredOutput, StructureKind

_ANYTHING: dict[str, Any] = {"type": "object"}
_COMPACT = {"whitespace_flexible": False}
"""llguidance's own field: nobody reads a call's blanks, and a weak model may write nothing else."""


def calls_structure(tools: Sequence[Tool], use: ToolUse) -> StructuredOutput:
    """A named tool's arguments, or a list of calls as `forced.listed` reads it. Raises InvalidRequest where it is too
    large."""
    if use.named:
        function = next(t.function for t in tools if t.function is not None and t.function.name == use.named)
        schema = function.parameters or _ANYTHING
    else:
        schema = _list_of_calls(tools, use.max_calls)
    # A function has the arguments that it names: a weak model that may write others does not come to an end.
    schema = {**closed(schema), "x-guidance": _COMPACT}
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), source="tools")


def _list_of_calls(tools: Sequence[Tool], max_calls: int | None) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        assert tool.function is not None
        parameters = dict(tool.function.parameters or _ANYTHING)
        for key in ("$defs", "definitions"):
            for name, schema in (parameters.pop(key, None) or {}).items():
                definitions[f"{i}.{name}"] = _moved(schema, i)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": _moved(parameters, i)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls} if len(calls) > 1 else calls[0]}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return schema


def _moved(schema: Any, tool: int) -> Any:
    """A schema with its references to definitions where they now are: each tool's under names of its own."""
    if isinstance(schema, list):
        return [_moved(item, tool) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, tool) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        for prefix in ("#/$defs/", "#/definitions/"):
            if reference.startswith(prefix):
                moved["$ref"] = f"#/$defs/{tool}.{reference.removeprefix(prefix)}"
    return moved
