"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as there are calls."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import NotAToolCall, Scanner, Tape, call_object, through
from services.router.edge.answer.tool_use import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
SPECIAL = (BEGIN, END)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`."""
    one = f"{rules.mark(BEGIN)} BLANKS? call BLANKS? {rules.mark(END)}"
    return f"calls: {rules.repeated('one')}\none: {one}\ncall: {rules.call('arguments')}\n"


def calls(events: Events, _tools: ToolUse) -> Scanner[None]:
    """The whole answer. Whatever name a call has is passed on: the marks leave no doubt that it is one."""
    while (yield from through(BEGIN, events.content)):
        tape = Tape(BEGIN)
        try:
            if (yield from tape.next_solid()) != "{":
                raise NotAToolCall
            yield from call_object(events, tape, lambda _: True)
            if not (yield from through(END, lambda _: None)):
                return
        except NotAToolCall:
            events.content(tape.text)
