"""The endpoint's dialect and its writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.http.anthropic.blocks import BlockEvents, blocks, event
from services.router.edge.http.anthropic.errors import AnthropicErrors
from services.router.edge.http.anthropic.inner import NAMES, chat_request
from services.router.edge.http.anthropic.schemas import parse_count, parse_messages
from services.router.edge.http.openai.chat import Chat, ParsedChat
from services.router.edge.output_stream import OutputDelta, OutputFinish


class Messages:
    """The endpoint's dialect, over the chat's."""

    errors = AnthropicErrors(NAMES)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def parse(self, body: bytes) -> ParsedMessages:
        """Raises InvalidRequest naming the field."""
        return ParsedMessages.of(self._chat.parsed(chat_request(parse_messages(body))))

    def parse_count(self, body: bytes) -> ParsedChat:
        """A body of `count_tokens`; raises InvalidRequest naming the field."""
        return self._chat.parsed(chat_request(parse_count(body)))


@dataclass(frozen=True, slots=True)
class ParsedMessages(ParsedChat):
    """See `ParsedRequest`."""

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> MessageWriter:
        """See `ParsedRequest`."""
        return MessageWriter(self, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> MessageWriter:
        """See `ParsedRequest`."""
        return MessageWriter(self, plan, request_id)


class MessageWriter:
    """A message as events and as one body."""

    def __init__(self, call: ParsedMessages, plan: Sequence[Request], request_id: str) -> None:
        self._id = f"msg_{request_id}"
        self._model = plan[0].adapter_name or call.dialect.model_name
        self._num_prompt_tokens = plan[0].num_prompt_tokens
        (self._answer,) = call.dialect.answers(plan, call.tools)
        self._blocks = BlockEvents()
        self._begun = False
        self._finish: OutputFinish | None = None

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that a delta brings."""
        assert index == 0, "a message is one answer"
        events = b""
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
            head = self._message([], None, None, usage)
            events = event("message_start", message=head) + event("ping")
        for found in self._answer.add(delta):
            events += self._blocks.add(found, self._answer.calls)
        if delta.finish is not None:
            self._finish = delta.finish
        return events

    def closing(self) -> bytes:
        """The end of the last block, and how the message ended."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return self._blocks.close() + event("message_delta", delta=delta, usage=self._usage()) + event("message_stop")

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta of a reply that is one body."""
        assert index == 0, "a message is one answer"
        self._answer.add(delta)
        if delta.finish is not None:
            self._finish = delta.finish

    def body(self) -> bytes:
        """Anthropic's `message` object."""
        return json.dumps(self._message(blocks(self._answer), *self._stop(), self._usage())).encode()

    def _message(
        self,
        content: list[dict[str, object]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, int],
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop(self) -> tuple[str, str | None]:
        finish = self._finish
        assert finish is not None, "the answer has not ended"
        if finish.reason is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(finish.stop_reason, str):
            return "stop_sequence", finish.stop_reason
        return ("tool_use" if self._answer.calls else "end_turn"), None

    def _usage(self) -> dict[str, int]:
        """Prompt tokens that were computed and those that were not, apart, as Anthropic counts them."""
        assert self._finish is not None, "the answer has not ended"
        usage = self._finish.usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
        }
