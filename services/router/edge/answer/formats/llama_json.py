"""Llama 3: `{"name": …, "parameters": {…}}` as the whole answer, several with `;` between them, or behind
`<|python_tag|>`. Nothing marks a call but its shape, so only objects that name a tool count."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import NotAToolCall, Scanner, Tape, call_object, rest, solid_behind
from services.router.edge.answer.tool_use import ToolUse

TAG = "<|python_tag|>"
SPECIAL = (TAG,)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`."""
    between = '";" BLANKS?'
    return f"calls: {rules.repeated('call', between)}\ncall: {rules.call('parameters')}\n"


def calls(events: Events, tools: ToolUse) -> Scanner[None]:
    """The whole answer."""
    tape = Tape()
    try:
        character = yield from solid_behind(TAG, tape)
        while character == "{":
            yield from call_object(events, tape, tools.names.__contains__)
            tape = Tape()
            character = yield from tape.next_solid()
            if character == ";":
                character = yield from tape.next_solid()
    except NotAToolCall:
        pass
    events.content(tape.text)
    yield from rest(events.content)
