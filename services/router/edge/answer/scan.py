"""Reading an answer one character at a time, so that how its text was cut into pieces cannot matter.

A scanner is a generator that is sent characters and at last "" for the end. Scanners call each other by `yield from`;
one that has to look a character ahead returns it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

from services.router.edge.answer.events import Events

T = TypeVar("T")
Scanner = Generator[None, str, T]
"""A parser of a part of the text, which returns T."""

MAX_NAME_LEN = 256
"""Longest name of a tool; a longer one is no call."""


class NotAToolCall(Exception):
    """The scanned text is not a tool call after all; it is content."""


class Tape:
    """Keeps what was read since it was made, for the case that it is no call."""

    def __init__(self, text: str = "") -> None:
        self._read = [text]

    def next(self) -> Scanner[str]:
        """The next character; "" at the end."""
        character = yield
        self._read.append(character)
        return character

    def next_solid(self) -> Scanner[str]:
        """The next character that is no blank."""
        while True:
            character = yield from self.next()
            if not character.isspace():
                return character

    @property
    def text(self) -> str:
        """The whole text read until now."""
        return "".join(self._read)


def solid_behind(tag: str, tape: Tape) -> Scanner[str]:
    """The first character that is no blank, behind `tag` where the text begins with it. Raises NotAToolCall where it
    begins as the tag does and continues differently."""
    character = yield from tape.next_solid()
    if character != tag[0]:
        return character
    for expected in tag[1:]:
        if (yield from tape.next()) != expected:
            raise NotAToolCall
    return (yield from tape.next_solid())


def until(mark: str, tape: Tape) -> Scanner[str]:
    """A short text up to `mark`, without it. Raises NotAToolCall where none comes within a name's length."""
    read = ""
    while not read.endswith(mark):
        character = yield from tape.next()
        read += character
        if not character or len(read) > MAX_NAME_LEN + len(mark):
            raise NotAToolCall
    return read[: -len(mark)]


def through(mark: str, write: Callable[[str], None]) -> Scanner[bool]:
    """Writes text until `mark` is complete, which is not written. False where the text ended first, all written."""
    table = [0] * (len(mark) + 1)
    length = 0
    for i in range(1, len(mark)):
        while length and mark[i] != mark[length]:
            length = table[length]
        length += mark[i] == mark[length]
        table[i + 1] = length
    state = 0
    while True:
        character = yield
        if not character:
            write(mark[:state])
            return False
        before = state
        while state and mark[state] != character:
            state = table[state]
        if mark[state] == character:
            state += 1
            write(mark[: before + 1 - state])
        else:
            write(mark[:before] + character)
        if state == len(mark):
            return True


def through_any(marks: tuple[str, ...], write: Callable[[str], None], held: str = "") -> Scanner[str]:
    """As `through` for the first of several marks, none of which is within another; returns it, "" where the text ended
    first. `held`: what was read of it already."""
    while character := (yield):
        held += character
        if held in marks:
            return held
        while held and not any(mark.startswith(held) for mark in marks):
            write(held[0])
            held = held[1:]
    write(held)
    return ""


def section(begin: str, mark: str, events: Events, call: Callable[[Events, Tape], Scanner[None]]) -> Scanner[None]:
    """A whole answer whose calls stand in one section behind `begin`, each behind `mark`; `call` reads one, or raises
    NotAToolCall, and then what it read is content. What stands between and behind calls is dropped: there is nothing
    but marks."""
    if not (yield from through(begin, events.content)):
        return
    while (yield from through(mark, lambda _: None)):
        tape = Tape(mark)
        try:
            yield from call(events, tape)
        except NotAToolCall:
            events.content(tape.text)


def rest(write: Callable[[str], None]) -> Scanner[None]:
    """Writes all that follows."""
    while character := (yield):
        write(character)


def string(tape: Tape) -> Scanner[str]:
    """A JSON string behind its quotation mark. Raises NotAToolCall."""
    raw = ['"']
    while True:
        character = yield from tape.next()
        raw.append(character)
        if character == "\\":
            raw.append((yield from tape.next()))
        elif character == '"':
            try:
                text = json.loads("".join(raw))
            except ValueError:
                raise NotAToolCall from None
            assert isinstance(text, str)
            return text
        elif not character:
            raise NotAToolCall


def value(first: str, tape: Tape, write: Callable[[str], None]) -> Scanner[str | None]:
    """A JSON value from its `first` character on, written as it comes. Returns the character behind a bare number or
    word, which marks its end; None where the value ends by itself; "" where the text ended in it."""
    depth, in_string = 0, False
    character = first
    while character:
        if in_string:
            if character == "\\":
                write(character)
                character = yield from tape.next()
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            if depth == 0:
                return character
            depth -= 1
        elif depth == 0 and (character == "," or character.isspace()):
            return character
        if character:
            write(character)
        if depth == 0 and not in_string and character in '"}]':
            return None
        character = yield from tape.next()
    return ""


def call_object(events: Events, tape: Tape, is_tool: Callable[[str], bool]) -> Scanner[None]:
    """`{"name": …, "arguments": {…}}` behind its brace; `parameters` is another name for arguments. Raises NotAToolCall
    where no call begins; one that has begun is read to its end."""
    held: list[str] = []
    begun = written = False

    def write(text: str) -> None:
        nonlocal written
        written = True
        if begun:
            events.arguments(text)
        else:
            held.append(text)

    character = yield from tape.next_solid()
    while character == '"':
        key = yield from string(tape)
        if (yield from tape.next_solid()) != ":":
            break
        character = yield from tape.next_solid()
        behind: str | None = None
        if key == "name" and character == '"' and not begun:
            name = yield from string(tape)
            if not is_tool(name) or not 0 < len(name) <= MAX_NAME_LEN:
                raise NotAToolCall
            events.begin_call(name)
            begun = True
            if held:
                events.arguments("".join(held))
        elif key in ("arguments", "parameters") and not written:
            if character == '"':
                write((yield from string(tape)))  # JSON within a string
            elif character == "{":
                behind = yield from value(character, tape, write)
            else:
                behind = yield from value(character, tape, lambda _: None)
        elif character in ("", ",", "}"):
            break
        else:
            behind = yield from value(character, tape, lambda _: None)
        if behind is None or behind.isspace():
            behind = yield from tape.next_solid()
        if behind != ",":
            character = behind
            break
        character = yield from tape.next_solid()
    if not begun:
        raise NotAToolCall
    if character == "}" and not written:
        events.arguments("{}")
