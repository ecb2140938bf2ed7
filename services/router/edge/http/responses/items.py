"""An answer as the items of a response, and the events that bring them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.http.answer_parts import Call, named_event
from services.router.edge.http.responses.schemas import InputItem

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def kept_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items of a call as they are kept and given back: each with an id and a status, content as parts."""
    return [_kept(item) for item in items]


def _kept(item: InputItem) -> dict[str, Any]:
    kept: dict[str, Any] = item.model_dump(exclude_none=True)
    kept["id"] = kept.get("id") or _new_id(item.type)
    kept.setdefault("status", "completed")
    content = kept.get("content")
    if isinstance(content, str):
        part: dict[str, Any] = {"type": "input_text", "text": content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        kept["content"] = [part]
    return kept


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


class OutputItems:
    """The items of one answer. Each call returns the events for what it changed."""

    def __init__(self) -> None:
        self.items: list[dict[str, object]] = []
        self._number = itertools.count()
        self._written: list[str] = []  # of the open item
        self._logprobs: list[object] = []
        self._is_open = False

    def event(self, kind: str, **fields: object) -> bytes:
        """The next event of the stream."""
        return named_event(kind, {"type": kind, "sequence_number": next(self._number), **fields})

    def add(self, found: Event, calls: Sequence[Call], logprobs: Sequence[object] = ()) -> bytes:
        """A part of the answer; `calls` are those begun so far, `logprobs` go with text."""
        match found:
            case Content(text):
                opened = self._open("message", {"role": "assistant", "content": []})
                self._logprobs += logprobs
                return opened + self._delta("response.output_text.delta", text, logprobs=list(logprobs))
            case Reasoning(text):
                opened = self._open("reasoning", {"summary": [], "content": []})
                return opened + self._delta("response.reasoning_text.delta", text)
            case CallBegun(index, name):
                closed = self.close()
                return closed + self._open("function_call", {"call_id": calls[index].id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                return self._delta("response.function_call_arguments.delta", text)

    def close(self, status: str = "completed") -> bytes:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        text, self._written = "".join(self._written), []
        place = self._place(item)
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self.event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == "reasoning":
            part: dict[str, object] = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            done = self.event("response.reasoning_text.done", **place, text=text)
            done += self.event("response.content_part.done", **place, part=part)
        else:
            logprobs, self._logprobs = self._logprobs, []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            item["content"] = [part]
            done = self.event("response.output_text.done", **place, text=text, logprobs=logprobs)
            done += self.event("response.content_part.done", **place, part=part)
        return done + self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _open(self, kind: str, fields: dict[str, object]) -> bytes:
        """An item of that kind, unless one is open already."""
        if self._is_open and self.items[-1]["type"] == kind != "function_call":
            return b""
        events = self.close()
        item: dict[str, object] = {
            "type": kind,
            "id": _new_id(kind),
            "status": "in_progress",
            **fields,
        }
        self.items.append(item)
        self._is_open = True
        events += self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        part: dict[str, object] | None = None
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        if part is not None:
            events += self.event("response.content_part.added", **self._place(item), part=part)
        return events

    def _delta(self, kind: str, text: str, **fields: object) -> bytes:
        self._written.append(text)
        return self.event(kind, **self._place(self.items[-1]), delta=text, **fields)

    def _place(self, item: Mapping[str, object]) -> dict[str, object]:
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}
