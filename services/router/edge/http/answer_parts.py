"""An answer as its reader found it: text, reasoning and calls. What all endpoints for conversations make of tokens."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.router.dispatch.request import Request
from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.answer.families import AnswerFormats
from services.router.edge.answer.reader import AnswerReader, ToolUse
from services.router.edge.answer.reasoning import Thinking
from services.router.edge.input_processor import prompt_end
from services.router.edge.text.output_processor import OutputDelta
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer

_SHORT_ID = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """One tool call."""

    id: str
    name: str
    arguments: str = ""  # JSON text


@dataclass(slots=True)
class AnswerParts:
    """One choice's answer so far."""

    reader: AnswerReader | None  # None: all text is content
    short_ids: bool = False
    calls: list[Call] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All content so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._thoughts)

    def add(self, delta: OutputDelta) -> list[Event]:
        """Takes a delta; returns what it brought. The last one brings what was held back."""
        if self.reader is None:
            found: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            found = self.reader.push(delta.text)
            if delta.finish is not None:
                found += self.reader.flush()
        self._keep(found)
        return found

    def skip(self, text: str) -> None:
        """What the client has of the answer from an earlier call."""
        if self.reader is not None:
            self._keep(self.reader.push(text))

    def _keep(self, found: Iterable[Event]) -> None:
        for event in found:
            match event:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
                case CallBegun(_, name):
                    self.calls.append(Call(self._new_id(), name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text

    def _new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


def answer_parts(
    plan: Sequence[Request], tools: ToolUse | None, formats: AnswerFormats, tokenizer: Tokenizer
) -> list[AnswerParts]:
    """One a choice, brought to where the client's text ends. Raises InvalidRequest (`resume`) where that cannot be
    told."""
    if tools is None and formats.reasoning is None:
        return [AnswerParts(None) for _ in plan]
    return [_parts(request, tools, formats, tokenizer) for request in plan]


def _parts(request: Request, tools: ToolUse | None, formats: AnswerFormats, tokenizer: Tokenizer) -> AnswerParts:
    is_open = False
    if formats.reasoning is not None:
        end = prompt_end(tokenizer, request.prompt_token_ids)
        is_open = formats.reasoning.behind(end) is Thinking.BEGUN
    parts = AnswerParts(AnswerReader(tools, formats.calls, formats.reasoning, is_open=is_open), formats.calls.short_ids)
    if request.resume is not None and request.resume.token_ids:
        if request.resume.num_chars is not None:
            raise InvalidRequest(
                "resume.num_chars: an answer with tools or reasoning goes on behind token_ids alone",
                field="resume.num_chars",
            )
        options = request.text
        detokenizer = tokenizer.stream(options.skip_special_tokens, options.kept_special)
        parts.skip(detokenizer.push(request.resume.token_ids))
    return parts


def kept_special(tools: ToolUse | None, formats: AnswerFormats) -> frozenset[str]:
    """Special tokens that are marks of an answer: they must not be lost on the way to its text."""
    marks = formats.reasoning
    kept = {marks.begin, marks.end} if marks is not None else set()
    if tools is not None and not tools.is_forced:
        kept |= set(formats.calls.special)
    return frozenset(kept)
