"""The structures of answers with tool calls: that there must be some, or that there may be, beside a format of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.router.edge.answer.call_rules import OF_ALL_TOOLS, CallRules, Rules, moved
from services.router.edge.answer.families import CallFormat
from services.router.edge.answer.python_rules import UnsupportedSchemaError, json_text
from services.router.edge.answer.reasoning import Channels
from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.http.openai.schemas import Tool
from services.router.edge.http.openai.structure_fields import closed
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer
from shared.structure.grammar_text import json_schema
from shared.structure.short_numbers import any_object
from shared.structure.structured_output import MAX_STRUCTURE_BYTES, ReasoningPart, StructuredOutput, StructureKind

_BLANKS = "BLANKS: /[ \\n\\r\\t]{1,16}/\n"
_BESIDE_CALLS = (StructureKind.JSON_OBJECT, StructureKind.JSON_SCHEMA, StructureKind.CHOICE)
_ANYTHING: dict[str, Any] = {"type": "object"}
_COMPACT = {"whitespace_flexible": False}
"""An option of llguidance. Whitespace in a call has no reader, and a weak model may produce it without end."""


def forced_structure(
    tools: Sequence[Tool], use: ToolUse, call_format: CallFormat, tokenizer: Tokenizer
) -> StructuredOutput:
    """Calls and nothing else: as JSON, or as the model writes them where all that it writes has a header. Raises
    InvalidRequest where it is too large."""
    try:
        if call_format.channels is None:
            return calls_structure(tools, use)
        chosen = [tool for tool in tools if use.named in ("", tool.for_name)]
        lark = f"start: calls\n{call_format.grammar(_rules(chosen, use, tokenizer))}{_BLANKS}"
    except UnsupportedSchemaError as error:
        raise InvalidRequest(f"tools: {error}", field="tools", limit=MAX_STRUCTURE_BYTES) from None
    structure = StructuredOutput(StructureKind.GRAMMAR, lark, source="tools")
    return _behind_reasoning(structure, call_format.channels)


def check_beside_forced_calls(answer: StructuredOutput | None) -> None:
    """Passes for a JSON `response_format`, which speaks of text, while the answer will be calls. Raises InvalidRequest
    for what the whole answer must match."""
    if answer is None:
        return
    field = answer.source or answer.kind.value
    if field.split(".")[0] != "response_format" or answer.kind not in _BESIDE_CALLS:
        raise InvalidRequest(f"{field} excludes tool_choice: an answer cannot match both", field=field)


def _behind_reasoning(structure: StructuredOutput, channels: Channels) -> StructuredOutput:
    """A structure that has its own headers."""
    marks = channels.before_call
    return replace(structure, reasoning=ReasoningPart(marks.begin, marks.end, is_open=False))


def calls_structure(tools: Sequence[Tool], use: ToolUse) -> StructuredOutput:
    """A named tool's arguments, or a list of calls as `forced.listed` reads it. Raises InvalidRequest where it is too
    large, UnsupportedSchemaError where the tools are."""
    if use.named:
        function = next(t.function for t in tools if t.function is not None and t.function.name == use.named)
        schema = function.parameters or _ANYTHING
    else:
        schema = _list_of_calls(tools, use.max_calls)
    # A function has the arguments that it names: a weak model that may add others can produce them without end.
    schema = {**closed(schema), "x-guidance": _COMPACT}
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), source="tools")


def call_or_answer(
    tools: Sequence[Tool], use: ToolUse, answer: StructuredOutput, call_format: CallFormat, tokenizer: Tokenizer
) -> StructuredOutput:
    """Calls as the model writes them, or what matches `answer`, where the model decides. Raises InvalidRequest (the
    answer's field) where the two cannot be one grammar."""
    field = answer.source or answer.kind.value
    if answer.kind not in _BESIDE_CALLS:
        raise InvalidRequest(
            f"{field} excludes tools: beside them an answer can match a JSON schema or a choice", field=field
        )

    rules, channels = _rules(tools, use, tokenizer), call_format.channels
    try:
        calls = call_format.grammar(rules)
    except UnsupportedSchemaError as error:
        raise InvalidRequest(
            f"{field} excludes tools whose arguments this model's way to write calls cannot be held to: {error}. Leave "
            "one of the two out, or let tool_choice say 'none' or 'required'",
            field=field,
        ) from None
    header = "".join(f"{rules.mark(part)} " for part in channels.text) if channels is not None else ""
    # A rule of its own: a choice has alternatives.
    lark = f"start: calls | {header}answer\n{calls}answer: {_answer_rule(answer)}\n{_BLANKS}"
    structure = StructuredOutput(StructureKind.GRAMMAR, lark, source=field)
    return structure if channels is None else _behind_reasoning(structure, channels)


def _rules(tools: Sequence[Tool], use: ToolUse, tokenizer: Tokenizer) -> CallRules:
    def mark(text: str) -> str:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return f"<[{token_ids[0]}]>" if len(token_ids) == 1 else json.dumps(text)

    return CallRules(
        mark,
        lambda arguments: _any_call_rule(tools, arguments),
        _compact,
        {name: closed(schema) for name, schema in _parameters(tools)},
        many=use.max_calls != 1,
    )


def _answer_rule(answer: StructuredOutput) -> str:
    if answer.kind is StructureKind.CHOICE:
        return " | ".join(map(json_text, answer.choices))
    schema = json.loads(answer.text) if answer.kind is StructureKind.JSON_SCHEMA else any_object()
    return f"%json {json_text(json_schema(schema))}"


def _any_call_rule(tools: Sequence[Tool], arguments: str) -> str:
    call, definitions = _any_call(tools, arguments)
    return _compact({**call, "$defs": definitions})


def _compact(schema: Mapping[str, Any]) -> str:
    return f"%json {json_text(json_schema({**closed(schema), 'x-guidance': _COMPACT}))}"


def _parameters(tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
    for tool in tools:
        assert tool.function is not None
        yield tool.function.name, dict(tool.function.parameters or _ANYTHING)


def _list_of_calls(tools: Sequence[Tool], max_calls: int | None) -> dict[str, Any]:
    call, definitions = _any_call(tools, "parameters")
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return {**schema, "$defs": definitions}


def _any_call(tools: Sequence[Tool], arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's object, with its arguments under that name, and the schemas that it refers to: each tool's own. Raises
    UnsupportedSchemaError."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    written = Rules(OF_ALL_TOOLS)
    for i, (tool, parameters) in enumerate(_parameters(tools)):
        written.append(json_text(parameters))
        place = f"#/$defs/{i}"
        definitions[str(i)] = moved(parameters, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool}, arguments: {"$ref": place}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls} if len(calls) > 1 else calls[0], definitions
