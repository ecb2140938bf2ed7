"""Harmony, of gpt-oss: messages between marks, each with a header that names its channel and whom it is for.

An answer has the header of its first message from the prompt, up to the role. `analysis` is reasoning, `commentary` and
`final` are text, and whatever is addressed to a function is a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import Events, HeldBlanks
from services.router.edge.answer.reasoning import Channels, ReasoningMarks
from services.router.edge.answer.scan import MAX_NAME_LEN, NotAToolCall, Scanner, Tape, through_any, value
from services.router.edge.answer.tool_use import ToolUse

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SPECIAL = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

NEXT = f"{START}assistant"
SIGN = f"{NEXT}{CHANNEL}"
"""Text by which a template of this family is recognised."""
_ANALYSIS, _FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
CHANNELS = Channels(
    before_text=ReasoningMarks(_ANALYSIS, f"{END}{NEXT}{_FINAL}"),
    before_call=ReasoningMarks(_ANALYSIS, f"{END}{NEXT}"),
    text=(CHANNEL, "final", MESSAGE),
)

_NAMESPACE = "functions."
_BEGINS = (NEXT, CHANNEL, CONSTRAIN, MESSAGE, "to=")
"""Beginnings of the text that may stand between a role and its message."""
_MAX_HEADER_LEN = MAX_NAME_LEN + 128
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_ENDS = (END, CALL, RETURN, NEXT)
_BETWEEN = "\n\n"
"""Between two messages of one kind."""


def grammar(rules: CallRules) -> str:
    """See `CallGrammar`. One call, whose end mark ends the answer; whom it is for stands on either side of the
    channel."""
    channel, message = rules.mark(CHANNEL), rules.mark(MESSAGE)
    kind = f'" " {rules.mark(CONSTRAIN)}? "json"'

    def one(name: str, arguments: str) -> str:
        return (
            f'{channel} "commentary to={_NAMESPACE}" {name} {kind} {message} {arguments} | '
            f'" to={_NAMESPACE}" {name} {channel} "commentary" {kind} {message} {arguments}'
        )

    return rules.by_tool("calls", one)


def calls(events: Events, tools: ToolUse) -> Scanner[None]:
    """The whole answer, reasoning included. Text without a header is content; a header that is cut off is dropped."""
    reasoning = _Reasoning(events)
    has_text = False
    while True:
        tape, held = Tape(), ""
        write: Callable[[str], None] = events.content  # what stands in no message
        try:
            header = yield from _header(tape)
            if name := _function(header, tools):
                held = yield from _arguments(events, name, tape)
                write = _nothing
            elif _channel(header) == "analysis":
                write = reasoning.begin()
            else:
                if has_text:
                    events.content(_BETWEEN)
                has_text = True
        except _CutOff:
            return
        except NotAToolCall:
            events.content(tape.text)
        if not (yield from through_any(_ENDS, write, held)):
            return


class _CutOff(Exception):
    """The answer ended within a header."""


def _header(tape: Tape) -> Scanner[str]:
    """What stands before a message. Raises NotAToolCall where something else does, _CutOff."""
    read = ""
    while not read.endswith(MESSAGE):
        character = yield from tape.next()
        read += character
        if not character and read.lstrip().startswith((START, CHANNEL, CONSTRAIN)):
            raise _CutOff
        begun = read.lstrip().removeprefix(NEXT).lstrip()
        may_be = any(begun.startswith(begin) or begin.startswith(begun) for begin in _BEGINS)
        if not character or not may_be or len(read) > _MAX_HEADER_LEN:
            raise NotAToolCall
    return read[: -len(MESSAGE)]


def _function(header: str, tools: ToolUse) -> str:
    """The name of the function that a message is for; empty: it is for none."""
    found = _RECIPIENT.search(header)
    recipient = found[1] if found else ""
    if recipient.startswith(_NAMESPACE):
        return recipient.removeprefix(_NAMESPACE)
    return recipient if recipient in tools.names else ""


def _channel(header: str) -> str:
    channels = _CHANNEL.findall(header)
    return str(channels[-1]) if channels else ""


def _arguments(events: Events, name: str, tape: Tape) -> Scanner[str]:
    """A call's message; none at all are no arguments. Returns what was read of the mark at its end. Raises
    NotAToolCall."""
    character = yield from tape.next_solid()
    if character not in ("{", "<", ""):
        raise NotAToolCall
    events.begin_call(name)
    if character == "{":
        yield from value("{", tape, events.arguments)
        return ""
    events.arguments("{}")
    return character


class _Reasoning:
    """Messages of reasoning as one text: without blanks around each, and with an empty line between them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._between = ""  # messages
        self._blanks = HeldBlanks()  # before more text of this message
        self._is_new = True

    def begin(self) -> Callable[[str], None]:
        """A message begins; returns what takes its text."""
        self._is_new = True
        return self._write

    def _write(self, text: str) -> None:
        if self._is_new:
            text, self._blanks = text.lstrip(), HeldBlanks(self._between)
        if not text:
            return
        self._is_new = False
        if kept := self._blanks.add(text):
            self._events.reasoning(kept)
            self._between = _BETWEEN


def _nothing(_: str) -> None:
    pass
