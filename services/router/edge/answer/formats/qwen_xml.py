"""Qwen3-Coder and Qwen 3.5: calls between tags, each argument between tags of its own.

`<tool_call>`, `<function=name>`, `<parameter=key>`, the value, `</parameter>`, `</function>` and `</tool_call>` stand
on lines of their own.
"""

from __future__ import annotations

import json

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import NotAToolCall, Scanner, Tape, through, through_any, until
from services.router.edge.answer.tagged_values import TaggedArguments, Tags, tagged_grammar
from services.router.edge.answer.tool_use import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SPECIAL = (BEGIN, END)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`."""
    tags = Tags(
        begin=lambda name: f'"{PARAMETER}" {name} ">\\n"',
        line_end='"\\n"',
        end=PARAMETER_END,
        end_symbol=json.dumps(PARAMETER_END),
        behind='"\\n"',
    )
    one = f'{rules.mark(BEGIN)} "\\n{FUNCTION}" tool "{FUNCTION_END}\\n" {rules.mark(END)}'
    return tagged_grammar(rules, tags, one, lambda name, arguments: f'{name} ">\\n" {arguments}')


def calls(events: Events, tools: ToolUse) -> Scanner[None]:
    """The whole answer. A function of the request without the tag around it is a call too: models leave that out."""
    while mark := (yield from through_any((BEGIN, FUNCTION), events.content)):
        tape = Tape(mark)
        try:
            if mark == BEGIN:
                yield from _function_tag(tape)
            name = (yield from until(">", tape)).strip()
            if not name or any(sign.isspace() for sign in name) or (mark != BEGIN and name not in tools.names):
                raise NotAToolCall
        except NotAToolCall:
            events.content(tape.text)
            continue
        events.begin_call(name)
        yield from _arguments(events, name, tools)
        if mark == BEGIN and not (yield from through(END, lambda _: None)):
            return


def _function_tag(tape: Tape) -> Scanner[None]:
    character = yield from tape.next_solid()
    for expected in FUNCTION:
        if character != expected:
            raise NotAToolCall
        if expected != FUNCTION[-1]:
            character = yield from tape.next()


def _arguments(events: Events, name: str, tools: ToolUse) -> Scanner[None]:
    arguments = TaggedArguments(tools.schemas.get(name, {}), events.arguments, trims=True)
    while mark := (yield from through_any((PARAMETER, FUNCTION_END), lambda _: None)):
        if mark == FUNCTION_END:
            arguments.close()
            return
        key: list[str] = []
        if not (yield from through(">", key.append)):
            return
        arguments.begin("".join(key).strip())
        if not (yield from through(PARAMETER_END, arguments.add)):
            return
        arguments.end()
