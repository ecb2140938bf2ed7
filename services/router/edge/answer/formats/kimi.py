"""Kimi: calls between marks, each with a name in a namespace, its number, and a JSON object."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import NotAToolCall, Scanner, Tape, section, until, value
from services.router.edge.answer.tool_use import ToolUse

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, SEPARATOR, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SPECIAL = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
_NAMESPACE = "functions."


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`. The numbers are the model's to count."""
    separator = rules.mark(SEPARATOR)

    def named(name: str, arguments: str) -> str:
        return f'"{_NAMESPACE}" {name} ":" CALL_NUMBER {separator} {arguments}'

    return (
        f"calls: {rules.mark(CALLS)} {rules.repeated('one')} {rules.mark(CALLS_END)}\n"
        f"one: {rules.mark(CALL)} named {rules.mark(CALL_END)}\nCALL_NUMBER: /[0-9]{{1,3}}/\n"
        f"{rules.by_tool('named', named)}"
    )


def calls(events: Events, _tools: ToolUse) -> Scanner[None]:
    """The whole answer."""
    yield from section(CALLS, CALL, events, _call)


def _call(events: Events, tape: Tape) -> Scanner[None]:
    identity = (yield from until(SEPARATOR, tape)).strip()
    name, colon, _ = identity.rpartition(":")
    name = (name if colon else identity).removeprefix(_NAMESPACE)
    first = (yield from tape.next_solid()) if name else ""
    if first == CALL_END[0]:  # a tool without arguments
        events.begin_call(name)
        events.arguments("{}")
        return
    if first != "{":
        raise NotAToolCall
    events.begin_call(name)
    yield from value("{", tape, events.arguments)
