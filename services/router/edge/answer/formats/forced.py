"""Answers that a grammar holds to tool calls: `tool_choice` required, or naming a tool. No marks, nothing but JSON."""

from __future__ import annotations

from services.router.edge.answer.events import Events
from services.router.edge.answer.scan import NotAToolCall, Scanner, Tape, call_object, rest, value


def named(events: Events, name: str) -> Scanner[None]:
    """The arguments of one call of `name`."""
    events.begin_call(name)
    character = yield from Tape().next_solid()
    if character:
        yield from value(character, Tape(), events.arguments)


def listed(events: Events) -> Scanner[None]:
    """`[{"name": …, "parameters": {…}}, …]`."""
    tape = Tape()
    try:
        character = yield from tape.next_solid()
        while character in ("[", ","):
            if (yield from tape.next_solid()) != "{":
                raise NotAToolCall
            yield from call_object(events, tape, lambda _: True)
            tape = Tape()
            character = yield from tape.next_solid()
    except NotAToolCall:
        events.content(tape.text)
    yield from rest(lambda _: None)
