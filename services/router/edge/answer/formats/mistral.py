"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}`, as often as there are calls."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import MAX_NAME_LEN, NotAToolCall, Scanner, Tape, call_object, through, value
from services.router.edge.answer.tool_use import ToolUse

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
SPECIAL = (MARK, ARGS, CALL_ID)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`. Either way to write them: the model knows its own."""
    between = 'BLANKS? "," BLANKS?'
    listed = f'BLANKS? "[" BLANKS? {rules.repeated("call", between)} BLANKS? "]"'
    mark, separator = rules.mark(MARK), rules.mark(ARGS)
    named = rules.by_tool("named", lambda name, arguments: f"{name} {separator} BLANKS? {arguments}")
    return (
        f"calls: {mark} {listed} | {rules.repeated('one')}\none: {mark} BLANKS? named\n"
        f"{named}call: {rules.call('arguments')}\n"
    )


def calls(events: Events, _tools: ToolUse) -> Scanner[None]:
    """The whole answer."""
    while (yield from through(MARK, events.content)):
        tape = Tape(MARK)
        try:
            character = yield from tape.next_solid()
            if character == "[":
                yield from _list(events, tape)
            else:
                yield from _named(events, tape, character)
        except NotAToolCall:
            events.content(tape.text)


def _list(events: Events, tape: Tape) -> Scanner[None]:
    character = yield from tape.next_solid()
    while character == "{":
        yield from call_object(events, tape, lambda _: True)
        character = yield from tape.next_solid()
        if character != ",":
            return
        character = yield from tape.next_solid()
    raise NotAToolCall


def _named(events: Events, tape: Tape, character: str) -> Scanner[None]:
    read = ""
    while character != "{":
        read += character
        if not character or len(read) > MAX_NAME_LEN + len(CALL_ID) + len(ARGS):
            raise NotAToolCall
        character = yield from tape.next()
    name = read.partition(ARGS)[0].partition(CALL_ID)[0].strip()
    if not name or any(sign.isspace() for sign in name):
        raise NotAToolCall
    events.begin_call(name)
    yield from value(character, tape, events.arguments)
