"""An answer as the content blocks of a message, and the events that bring them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.http.answer_parts import AnswerParts, Call, named_event


def event(kind: str, **fields: object) -> bytes:
    """A server-sent event with its name."""
    return named_event(kind, {"type": kind, **fields})


class BlockEvents:
    """The events of one answer's blocks, which follow each other without a gap."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the open block; empty: none is open

    def add(self, found: Event, calls: Sequence[Call]) -> bytes:
        """A part of the answer; `calls` are those begun so far."""
        match found:
            case Content(text):
                return self._open("text", {"text": ""}) + self._delta("text_delta", "text", text)
            case Reasoning(text):
                opened = self._open("thinking", {"thinking": "", "signature": ""})
                return opened + self._delta("thinking_delta", "thinking", text)
            case CallBegun(index, name):
                return self.close() + self._open("tool_use", {"id": calls[index].id, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)

    def close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self._kind:
            return b""
        # Clients may require a signature. The content is not verified: reasoning is sent and read as plain text.
        signed = self._delta("signature_delta", "signature", "") if self._kind == "thinking" else b""
        self._kind = ""
        return signed + event("content_block_stop", index=self._index)

    def _open(self, kind: str, fields: Mapping[str, object]) -> bytes:
        if self._kind == kind:
            return b""
        closed = self.close()
        self._kind = kind
        self._index += 1
        return closed + event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, name: text})


def blocks(answer: AnswerParts) -> list[dict[str, object]]:
    """A whole answer's blocks. Arguments that were cut off, and are no JSON object, become an empty input."""
    found: list[dict[str, object]] = []
    if answer.reasoning:
        found.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not answer.calls:
        found.append({"type": "text", "text": answer.text})
    found += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in answer.calls]
    return found


def _input(call: Call) -> Mapping[str, object]:
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
