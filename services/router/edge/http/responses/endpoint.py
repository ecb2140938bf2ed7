"""The endpoint's dialect and its writers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.answer.events import Content, Reasoning
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.chat import Chat, ParsedChat
from services.router.edge.http.responses.inner import NAMES, chat_request
from services.router.edge.http.responses.items import OutputItems
from services.router.edge.http.responses.schemas import ResponseRequest, ToolName, parse_response
from services.router.edge.output_stream import OutputDelta, OutputFinish


class Responses:
    """The endpoint's dialect, over the chat's."""

    errors = OpenAIErrors(NAMES)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def parse(self, body: bytes) -> ParsedResponse:
        """Raises InvalidRequest naming the field."""
        request = parse_response(body)
        return ParsedResponse.of(self._chat.parsed(chat_request(request)), original=request)


@dataclass(frozen=True, slots=True)
class ParsedResponse(ParsedChat):
    """See `ParsedRequest`."""

    original: ResponseRequest

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> ResponseWriter:
        """See `ParsedRequest`."""
        return ResponseWriter(self, plan, request_id)


class ResponseWriter:
    """A response as events and as one body: both are the same items."""

    def __init__(self, call: ParsedResponse, plan: Sequence[Request], request_id: str) -> None:
        self._call = call
        self._id = f"resp_{request_id}"
        self._model = plan[0].adapter_name or call.dialect.model_name
        self._created_at = int(time.time())
        (self._answer,) = call.dialect.answers(plan, call.tools)
        self._items = OutputItems()
        self._begun = False
        self._finish: OutputFinish | None = None
        self._num_reasoning_tokens = 0
        self._logprobs: list[object] = []  # of tokens whose text is held back

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that a delta brings."""
        assert index == 0, "a response has one answer"
        events = b""
        if not self._begun:
            self._begun = True
            response = self._response("in_progress")
            events = self._items.event("response.created", response=response)
            events += self._items.event("response.in_progress", response=response)
        found = self._answer.add(delta)
        if not self._answer.text and not self._answer.calls and self._answer.reasoning:
            self._num_reasoning_tokens += len(delta.token_ids)
        if self._call.body.logprobs and not all(isinstance(event, Reasoning) for event in found):
            self._logprobs += self._call.dialect.logprobs(delta)
        for event in found:
            logprobs: list[object] = []
            if isinstance(event, Content):
                logprobs, self._logprobs = self._logprobs, []
            events += self._items.add(event, self._answer.calls, logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
        return events

    def closing(self) -> bytes:
        """The end of the last item, and the whole response."""
        status = self._status()
        events = self._items.close(status)
        return events + self._items.event(f"response.{status}", response=self._response(status))

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta of a reply that is one body."""
        self.events(index, delta)

    def body(self) -> bytes:
        """OpenAI's `response` object."""
        status = self._status()
        self._items.close(status)
        return json.dumps(self._response(status)).encode()

    def _status(self) -> str:
        assert self._finish is not None, "the answer has not ended"
        return "incomplete" if self._finish.reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, object]:
        request = self._call.original
        sampling = self._call.sampling
        given = request.model_dump(exclude_none=True, by_alias=True, include={"tools", "text", "reasoning"})
        text: dict[str, Any] = {"format": {"type": "text"}, **given.get("text", {})}
        choice = request.tool_choice
        response: dict[str, object] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._items.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "store": False,
            "temperature": sampling.temperature,
            "text": text,
            "tool_choice": choice.model_dump() if isinstance(choice, ToolName) else choice or "auto",
            "tools": given.get("tools", []),
            "top_p": sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        if self._finish is not None and status != "in_progress":
            usage = self._finish.usage
            response["completed_at"] = int(time.time())
            response["usage"] = {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            }
        return response
