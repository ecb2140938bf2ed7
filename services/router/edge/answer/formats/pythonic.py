"""Llama 3.2 and 4: `[name(city="Rome", days=2), other()]` as the whole answer. Each call comes when it is complete: its
arguments are Python and have to be turned into JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events
from services.router.edge.answer.python_rules import ARGUMENT_NAME, COMMA, PythonRules
from services.router.edge.answer.scan import MAX_NAME_LEN, NotAToolCall, Scanner, Tape, rest, solid_behind
from services.router.edge.answer.tool_use import ToolUse

TAG, TAG_END = "<|python_start|>", "<|python_end|>"
SPECIAL = (TAG, TAG_END)
MAX_CALL_LEN = 65_536
"""Characters of one call; a longer one is text."""


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`."""
    listed = f'"[" {rules.repeated("tool", COMMA)} "]"'
    tool = rules.by_schema(PythonRules, lambda name, arguments: f'{name} "(" {arguments} ")"')
    return f"calls: {listed} | {rules.mark(TAG)} {listed} {rules.mark(TAG_END)}?\n{tool}"


def calls(events: Events, tools: ToolUse) -> Scanner[None]:
    """Reads a whole answer: calls, or text where it begins with none."""
    tape = Tape()
    try:
        character = yield from solid_behind(TAG, tape)
        if character != "[":
            raise NotAToolCall
        while True:
            yield from _call(events, tape, tools)
            tape = Tape()
            character = yield from tape.next_solid()
            if character != ",":
                break
        tape = Tape("" if character == "]" else character)
    except NotAToolCall:
        pass
    text = tape.text
    behind: list[str] = []
    yield from rest(behind.append if events.num_calls else _passed(events, text))
    if events.num_calls:
        events.content((text + "".join(behind)).replace(TAG_END, ""))


def _passed(events: Events, text: str) -> Callable[[str], None]:
    events.content(text)
    return events.content


def _call(events: Events, tape: Tape, tools: ToolUse) -> Scanner[None]:
    name = ""
    character = yield from tape.next_solid()
    while character != "(":
        name += character
        if not character or len(name) > MAX_NAME_LEN:
            raise NotAToolCall
        character = yield from tape.next()
    if name not in tools.names:
        raise NotAToolCall
    source = yield from _arguments(tape)
    events.begin_call(name)
    events.arguments(source)


def _arguments(tape: Tape) -> Scanner[str]:
    """The arguments as JSON, behind the opening parenthesis."""
    arguments: list[str] = []
    read: list[str] = []
    depth, quote, length = 0, "", 0
    while True:
        character = yield from tape.next()
        length += 1
        if not character or length > MAX_CALL_LEN:
            raise NotAToolCall
        if quote:
            if character == "\\":
                read.append(character)
                character = yield from tape.next()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                return _as_json([*arguments, "".join(read)])
            depth -= 1
        elif character == "," and depth == 0:
            arguments.append("".join(read))
            read.clear()
            continue
        read.append(character)


def _as_json(arguments: list[str]) -> str:
    """Each by itself: a tool's parameter may have a name that is no name in Python, such as `from`."""
    if not arguments[-1].strip():  # none, or a comma at the end
        del arguments[-1]
    values: dict[str, object] = {}
    try:
        for argument in arguments:
            name, equals, source = (part.strip() for part in argument.partition("="))
            if not equals or re.fullmatch(ARGUMENT_NAME, name) is None:
                raise NotAToolCall
            values[name] = ast.literal_eval(source)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotAToolCall from None
    # Python keeps both halves of a character beyond 16 bits apart where they were written as two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
