"""GLM-4.5: calls between tags, with the name first and each argument's name and value between tags of their own."""

from __future__ import annotations

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import MAX_NAME_LEN, NotAToolCall, Scanner, Tape, through, through_any
from services.router.edge.answer.tagged_values import TaggedArguments, Tags, tagged_grammar
from services.router.edge.answer.tool_use import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
SPECIAL = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`. GLM-4.5 and 4.6 write line ends between the tags, later ones none."""
    tags = Tags(
        begin=lambda name: f"{rules.mark(KEY)} {name} {rules.mark(KEY_END)} BLANKS? {rules.mark(VALUE)}",
        line_end="",
        end=VALUE_END,
        end_symbol=rules.mark(VALUE_END),
        behind="BLANKS?",
    )
    one = f"{rules.mark(BEGIN)} tool {rules.mark(END)}"
    return tagged_grammar(rules, tags, one, lambda name, arguments: f"{name} BLANKS? {arguments}")


def calls(events: Events, tools: ToolUse) -> Scanner[None]:
    """The whole answer. Whatever name a call has is passed on: the marks leave no doubt that it is one."""
    while (yield from through(BEGIN, events.content)):
        tape = Tape(BEGIN)
        try:
            name, mark = yield from _name(tape)
        except NotAToolCall:
            events.content(tape.text)
            continue
        events.begin_call(name)
        arguments = TaggedArguments(tools.schemas.get(name, {}), events.arguments)
        if not (yield from _arguments(arguments, mark)):
            return


def _name(tape: Tape) -> Scanner[tuple[str, str]]:
    """The name and the mark behind it, which begins an argument or ends the call."""
    read = ""
    while True:
        character = yield from tape.next()
        read += character
        if not character or len(read) > MAX_NAME_LEN + len(END):
            raise NotAToolCall
        for mark in (KEY, END):
            if read.endswith(mark):
                name = read.removesuffix(mark).strip()
                if not name or any(sign.isspace() or sign in "{<" for sign in name):
                    raise NotAToolCall
                return name, mark


def _arguments(arguments: TaggedArguments, mark: str) -> Scanner[bool]:
    """Behind the first mark. False where the text ended first."""
    while mark == KEY:
        key: list[str] = []
        if not (yield from through(KEY_END, key.append)) or not (yield from through(VALUE, lambda _: None)):
            return False
        arguments.begin("".join(key).strip())
        if not (yield from through(VALUE_END, arguments.add)):
            return False
        arguments.end()
        mark = yield from through_any((KEY, END), lambda _: None)
    if mark:
        arguments.close()
    return bool(mark)
