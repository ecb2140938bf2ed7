"""Llama 3.2 and 4: `[name(city="Rome", days=2), other()]` as the whole answer. Each call comes when it is complete: its
arguments are Python and have to be turned into JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable

from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import MAX_NAME_LEN, NoCallError, Scanner, Tape, rest, solid_behind

TAG, TAG_END = "<|python_start|>", "<|python_end|>"
SPECIAL = (TAG, TAG_END)
MAX_CALL_LEN = 65_536
"""Characters of one call; a longer one is text."""


def calls(events: Events, is_tool: Callable[[str], bool]) -> Scanner[None]:
    """The whole answer."""
    tape = Tape()
    try:
        character = yield from solid_behind(TAG, tape)
        if character != "[":
            raise NoCallError
        while True:
            yield from _call(events, tape, is_tool)
            tape = Tape()
            character = yield from tape.next_solid()
            if character != ",":
                break
        tape = Tape("" if character == "]" else character)
    except NoCallError:
        pass
    text = tape.text
    behind: list[str] = []
    yield from rest(behind.append if events.num_calls else _passed(events, text))
    if events.num_calls:
        events.content((text + "".join(behind)).replace(TAG_END, ""))


def _passed(events: Events, text: str) -> Callable[[str], None]:
    events.content(text)
    return events.content


def _call(events: Events, tape: Tape, is_tool: Callable[[str], bool]) -> Scanner[None]:
    name = ""
    character = yield from tape.next_solid()
    while character != "(":
        name += character
        if not character or len(name) > MAX_NAME_LEN:
            raise NoCallError
        character = yield from tape.next()
    if not is_tool(name):
        raise NoCallError
    source = yield from _arguments(tape)
    events.begin_call(name)
    events.arguments(source)


def _arguments(tape: Tape) -> Scanner[str]:
    """The arguments as JSON, behind the opening parenthesis."""
    read: list[str] = []
    depth, quote = 0, ""
    while True:
        character = yield from tape.next()
        if not character or len(read) > MAX_CALL_LEN:
            raise NoCallError
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
                return _as_json("".join(read))
            depth -= 1
        read.append(character)


def _as_json(arguments: str) -> str:
    try:
        call = ast.parse(f"f({arguments}\n)", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise NoCallError
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        raise NoCallError from None
