"""What is found in an answer's text, in order."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text for the reader of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thinks to itself."""

    text: str


class CallBegun(NamedTuple):
    """A tool call; its arguments follow."""

    call: int  # index among the answer's calls, from 0
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON text."""

    call: int
    text: str


Event = Content | Reasoning | CallBegun | CallArguments


class Events:
    """Takes down what a format finds. Neighbours of one kind are joined, and blanks around calls are dropped."""

    def __init__(self, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are dropped; None: all are kept."""
        self._found: list[Event] = []
        self._blanks = ""  # between what was written and what is not known yet
        self._max_calls = max_calls
        self.num_calls = 0  # those dropped included
        self._wrote_content = False

    def content(self, text: str) -> None:
        """Text; blanks at its end wait for what follows, and those behind a call for text."""
        if not text:
            return
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            if self.num_calls and not self._wrote_content:
                kept = kept.lstrip()
            self._wrote_content = True
            self._join(Content(kept))

    def reasoning(self, text: str) -> None:
        """Text of the model's reasoning, as it is."""
        self._join(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """A call of that name; blanks before it are dropped."""
        self._blanks = ""
        self._wrote_content = False
        self.num_calls += 1
        if not self._is_dropped:
            self._found.append(CallBegun(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds to the last call's arguments."""
        if not self._is_dropped:
            self._join(CallArguments(self.num_calls - 1, text))

    def take(self) -> list[Event]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found

    def end(self) -> None:
        """The answer is over: blanks at the end of its text are part of it."""
        if self._blanks and not self.num_calls:
            self._join(Content(self._blanks))
        self._blanks = ""

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _join(self, event: Content | Reasoning | CallArguments) -> None:
        last = self._found[-1] if self._found else None
        if type(last) is type(event):
            self._found[-1] = last._replace(text=last.text + event.text)
        else:
            self._found.append(event)
