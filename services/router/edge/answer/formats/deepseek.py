"""DeepSeek: calls between marks, of V3 and R1 with `function`, the name and a fenced JSON object, of V3.1 with the name
and the object alone."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import MAX_NAME_LEN, NotAToolCall, Scanner, Tape, section, until, value
from services.router.edge.answer.tool_use import ToolUse

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SPECIAL = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`. As V3 or as V3.1: the model knows its own."""
    separator = rules.mark(SEPARATOR)

    def named(name: str, arguments: str) -> str:
        fenced = f'"function" {separator} {name} "\\n```json\\n" {arguments} "\\n```"'
        return f"{fenced} | {name} {separator} {arguments}"

    return (
        f"calls: {rules.mark(CALLS)} {rules.repeated('one')} {rules.mark(CALLS_END)}\n"
        f"one: {rules.mark(CALL)} named {rules.mark(CALL_END)}\n{rules.by_tool('named', named)}"
    )


def calls(events: Events, _tools: ToolUse) -> Scanner[None]:
    """The whole answer."""
    yield from section(CALLS, CALL, events, _call)


def _call(events: Events, tape: Tape) -> Scanner[None]:
    before = yield from until(SEPARATOR, tape)
    behind = ""
    while not behind.endswith("{"):
        character = yield from tape.next()
        behind += character
        if not character or len(behind) > MAX_NAME_LEN:
            raise NotAToolCall
    # V3 writes a type before the name and a fence behind it; V3.1 has the name where V3 has the type.
    name = behind[:-1].replace("```json", "").strip() or before.strip()
    if not name:
        raise NotAToolCall
    events.begin_call(name)
    yield from value("{", tape, events.arguments)
