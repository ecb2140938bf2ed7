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


class HeldBlanks:
    """A text whose last blanks wait for what follows, which may drop them."""

    def __init__(self, text: str = "") -> None:
        """`text`: blanks that wait from the beginning."""
        self._held = [text] if text else []

    def add(self, text: str) -> str:
        """More of the text; returns what waits no longer: up to the last character that is no blank."""
        kept = text.rstrip()
        behind = text[len(kept) :]
        if kept:
            kept = "".join((*self._held, kept))
            self._held.clear()
        if behind:
            self._held.append(behind)
        return kept

    def take(self) -> str:
        """The blanks that wait, for the last time."""
        found = "".join(self._held)
        self._held.clear()
        return found


class Events:
    """Takes down what a format finds. Neighbours of one kind are joined, and blanks around calls are dropped."""

    def __init__(self, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are dropped; None: all are kept."""
        self._found: list[Event] = []
        self._pieces: list[str] = []  # of the last event's text, the first apart
        self._blanks = HeldBlanks()  # between what was written and what is not known yet
        self._max_calls = max_calls
        self.num_calls = 0  # those dropped included
        self._wrote_content = False

    def content(self, text: str) -> None:
        """Text; blanks at its end wait for what follows, and those behind a call for text."""
        if kept := self._blanks.add(text):
            if self.num_calls and not self._wrote_content:
                kept = kept.lstrip()
            self._wrote_content = True
            self._join(Content(kept))

    def reasoning(self, text: str) -> None:
        """Text of the model's reasoning, as it is."""
        self._join(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """A call of that name; blanks before it are dropped."""
        self._blanks.take()
        self._wrote_content = False
        self.num_calls += 1
        if not self._is_dropped:
            self._close()
            self._found.append(CallBegun(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds to the last call's arguments."""
        if not self._is_dropped:
            self._join(CallArguments(self.num_calls - 1, text))

    def take(self) -> list[Event]:
        """What was found since the last call."""
        self._close()
        found, self._found = self._found, []
        return found

    def end(self) -> None:
        """The answer is over: blanks at the end of its text are part of it."""
        if (blanks := self._blanks.take()) and not self.num_calls:
            self._join(Content(blanks))

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _join(self, event: Content | Reasoning | CallArguments) -> None:
        if self._found and type(self._found[-1]) is type(event):
            self._pieces.append(event.text)
        else:
            self._close()
            self._found.append(event)

    def _close(self) -> None:
        """Joins the pieces of the last event, each of which may be a character of a long text."""
        if self._pieces:
            last = self._found[-1]
            assert not isinstance(last, CallBegun)
            self._found[-1] = last._replace(text="".join((last.text, *self._pieces)))
            self._pieces.clear()
