"""An answer as the items of a response, and the events that bring them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.http.answer_parts import Call, named_event
from services.router.edge.http.responses.inner import NO_TOOLS
from services.router.edge.http.responses.mcp.servers import ServerTool
from services.router.edge.http.responses.schemas import InputItem

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_CALLS = ("function_call", "mcp_call", "mcp_approval_request")
_PREFIXES |= {"mcp_list_tools": "mcpl", "mcp_call": "mcp"}
_PREFIXES |= {"mcp_approval_request": "mcpr", "mcp_approval_response": "mcpa"}


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

    def __init__(self, server_tools: Mapping[str, ServerTool] = NO_TOOLS) -> None:
        """`server_tools`: of MCP servers, by name; their calls are items of other kinds."""
        self._server_tools = server_tools
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
                if name in self._server_tools:
                    return closed + self._open_server_call(name, self._server_tools[name])
                return closed + self._open("function_call", {"call_id": calls[index].id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                kind = self.items[-1]["type"]
                if kind == "mcp_approval_request":
                    self._written.append(text)
                    return b""
                return self._delta(f"response.{kind}_arguments.delta", text)

    def end_text(self, logprobs: Sequence[object]) -> bytes:
        """The log-probabilities of an answer's last tokens, which have no text, where a message is open."""
        if not logprobs or not self._is_open or self.items[-1]["type"] != "message":
            return b""
        self._logprobs += logprobs
        return self._delta("response.output_text.delta", "", logprobs=list(logprobs))

    def whole(self, item: dict[str, object]) -> bytes:
        """An item that came at once, without its id."""
        item = {"id": _new_id(str(item["type"])), **item}
        self.items.append(item)
        place = {"output_index": len(self.items) - 1, "item": item}
        return self.event("response.output_item.added", **place) + self.event("response.output_item.done", **place)

    @property
    def waiting_calls(self) -> list[dict[str, object]]:
        """Calls of servers' tools that are still to be made."""
        return [item for item in self.items if item["type"] == "mcp_call" and item["status"] == "in_progress"]

    def called(self, item: dict[str, object], output: str | None, error: str | None) -> bytes:
        """Ends a waiting call of a server's tool with its output or error; returns the events of it."""
        status = "completed" if error is None else "failed"
        item |= {"status": status, "output": output, "error": error}
        index = next(i for i, other in enumerate(self.items) if other is item)
        events = self.event(f"response.mcp_call.{status}", item_id=item["id"], output_index=index)
        return events + self.event("response.output_item.done", output_index=index, item=item)

    def _open_server_call(self, name: str, tool: ServerTool) -> bytes:
        fields: dict[str, object] = {"server_label": tool.label, "name": name, "arguments": ""}
        if not tool.needs_approval:
            fields |= {"output": None, "error": None, "approval_request_id": None}
            opened = self._open("mcp_call", fields)
            place = self._place(self.items[-1])
            return opened + self.event("response.mcp_call.in_progress", **place)
        self.items.append({"type": "mcp_approval_request", "id": _new_id("mcp_approval_request"), **fields})
        self._is_open = True
        return b""

    def close(self, status: str = "completed") -> bytes:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.items[-1]
        text, self._written = "".join(self._written), []
        place = self._place(item)
        if item["type"] == "mcp_approval_request":
            item["arguments"] = text
            whole = {"output_index": len(self.items) - 1, "item": item}
            return self.event("response.output_item.added", **whole) + self.event("response.output_item.done", **whole)
        if item["type"] == "mcp_call":
            item["arguments"] = text
            if status != "completed":  # its arguments are cut off: it is not made
                item |= {"status": status, "error": "the call was not written to its end"}
            return self.event("response.mcp_call_arguments.done", **place, arguments=text)
        item["status"] = status
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
        if self._is_open and self.items[-1]["type"] == kind and kind not in _CALLS:
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
        return place if item["type"] in _CALLS else {**place, "content_index": 0}
