"""An answer's text, piece by piece, to what it means."""

from __future__ import annotations

from collections.abc import Callable

from services.router.edge.answer.events import Event, Events
from services.router.edge.answer.families import CallFormat
from services.router.edge.answer.formats import forced
from services.router.edge.answer.reasoning import ReasoningMarks, reasoning
from services.router.edge.answer.scan import Scanner, rest
from services.router.edge.answer.tool_use import NO_TOOLS, ToolUse


class AnswerReader:
    """Reads one answer. What it finds does not depend on how the text is cut, but for where events are cut."""

    def __init__(
        self,
        tools: ToolUse | None,
        call_format: CallFormat,
        marks: ReasoningMarks | None,
        *,
        is_open: bool,
    ) -> None:
        """`marks`: None where reasoning is not looked for; `is_open`: the prompt ended within reasoning."""
        if tools is None and call_format.channels is not None:
            tools = NO_TOOLS
        self._events = events = Events(tools.max_calls if tools else None)
        self._pending: list[Callable[[], Scanner[object]]] = []
        if marks is not None and call_format.channels is None:
            self._pending.append(lambda: reasoning(marks, events, is_open))
        self._pending.append(lambda: _answer(events, tools, call_format))
        self._scanner: Scanner[object] | None = None
        self._begin_next()

    @property
    def num_calls(self) -> int:
        """Calls that began so far, those that were dropped included."""
        return self._events.num_calls

    def push(self, text: str) -> list[Event]:
        """Takes more text; returns what is certain by now."""
        self._send(text)
        return self._events.take()

    def flush(self) -> list[Event]:
        """The text is over: what was held back."""
        while self._scanner is not None:
            self._send_one("")
        self._events.end()
        return self._events.take()

    def _send(self, text: str) -> None:
        for character in text:
            self._send_one(character)

    def _send_one(self, character: str) -> None:
        if self._scanner is None:
            return
        try:
            self._scanner.send(character)
        except StopIteration as stop:
            self._begin_next()
            if isinstance(stop.value, str):
                self._send(stop.value)

    def _begin_next(self) -> None:
        self._scanner = self._pending.pop(0)() if self._pending else None
        if self._scanner is not None:
            next(self._scanner)


def _answer(events: Events, tools: ToolUse | None, call_format: CallFormat) -> Scanner[None]:
    if tools is None:
        return rest(events.content)
    if call_format.channels is not None:
        return call_format.calls(events, tools)
    if tools.named:
        return forced.named(events, tools.named)
    if tools.required:
        return forced.listed(events)
    return call_format.calls(events, tools)
