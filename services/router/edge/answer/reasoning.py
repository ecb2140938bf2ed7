"""Reasoning that a model writes between two marks before its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.router.edge.answer.events import Events, HeldBlanks
from services.router.edge.answer.scan import Scanner, through


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The strings with which a model begins and ends its reasoning."""

    begin: str
    end: str

    def behind(self, prompt_end: str) -> Thinking:
        """Whether an answer to a prompt of this end reasons."""
        text = prompt_end.rstrip()
        if text.endswith(self.begin):
            return Thinking.BEGUN
        return Thinking.OVER if text.endswith(self.end) else Thinking.POSSIBLE


@dataclass(frozen=True, slots=True)
class Channels:
    """Marks of a family whose text and calls stand in messages, each behind a header, as its reasoning does."""

    before_text: ReasoningMarks
    """Around the reasoning, up to the answer's text."""
    before_call: ReasoningMarks
    """Around the reasoning, up to the header of a call or of text."""
    text: tuple[str, ...]
    """The header of text, mark by mark."""


class Thinking(Enum):
    """State of the model's reasoning at the end of a prompt."""

    BEGUN = "begun"
    """The template began it: the answer begins within it."""
    OVER = "over"
    """The template closed it: it is switched off."""
    POSSIBLE = "possible"
    """The model may begin it itself."""


def reasoning(marks: ReasoningMarks, events: Events, is_open: bool) -> Scanner[str]:
    """The reasoning at the beginning of an answer, if there is any; returns what was read of the text behind it.

    `is_open`: the prompt ended with the mark that begins it. Blanks around the reasoning are dropped.
    """
    if not is_open:
        blanks, read = [], ""
        while marks.begin.startswith(read) and read != marks.begin:
            character = yield
            if not character:
                break
            if read or not character.isspace():
                read += character
            else:
                blanks.append(character)
        if read != marks.begin:
            return "".join((*blanks, read))
    held, begun = HeldBlanks(), False

    def write(text: str) -> None:
        nonlocal begun
        if kept := held.add(text if begun else text.lstrip()):
            begun = True
            events.reasoning(kept)

    if not (yield from through(marks.end, write)):
        return ""
    while True:
        character = yield
        if not character.isspace():
            return character
