"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.edge.http.envelope import (
    DONE,
    ChunkSuffix,
    Envelope,
    Totals,
    choice_end,
    start_member,
    tandem_member,
)
from services.router.edge.http.logprobs import chat_logprobs
from services.router.edge.http.parsed_request import ParsedRequest
from services.router.edge.http.schemas import ChatRequest, parse_chat
from services.router.edge.input_processor import ChatPrompt
from services.router.edge.output_processor import OutputDelta
from services.router.request import Request
from shared.model.tokenizer import Tokenizer


class Chat:
    """The endpoint's dialect."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._tokenizer = tokenizer
        self.model_name = model_name

    def parse(self, body: bytes) -> ParsedChat:
        """Raises InvalidRequest naming the field."""
        request = parse_chat(body)
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_tokens = request.max_tokens
        return ParsedChat(
            prompts=[ChatPrompt([message.for_template() for message in request.messages])],
            n=request.n or 1,
            sampling=request.sampling_params(max_tokens, (request.top_logprobs or 0) if request.logprobs else None),
            default_max_tokens=None,
            model=request.model or "",
            cache_salt=request.cache_salt or "",
            request_id=request.request_id or "",
            stream=bool(request.stream),
            resumed=request.resumed_choices,
            dialect=self,
            body=request,
        )

    def logprobs(self, delta: OutputDelta) -> list[object]:
        """`logprobs.content` of a delta."""
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs)


@dataclass(frozen=True, slots=True)
class ParsedChat(ParsedRequest):
    """See `ParsedRequest`."""

    dialect: Chat
    body: ChatRequest

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> ChatStream:
        """See `ParsedRequest`."""
        return ChatStream(self.dialect, self.body, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> ChatBody:
        """See `ParsedRequest`."""
        return ChatBody(self.dialect, self.body, plan, request_id)


class ChatStream:
    """A chat completion as server-sent events."""

    def __init__(self, dialect: Chat, request: ChatRequest, plan: Sequence[Request], request_id: str) -> None:
        self._dialect = dialect
        self._request = request
        self._plan = plan
        self._totals = Totals(plan, len(plan))
        self._envelope = Envelope(f"chatcmpl-{request_id}", "chat.completion.chunk", dialect.model_name)
        self._suffixes = ChunkSuffix(plan, include_usage=request.include_usage, continuous=request.continuous_usage)
        self._detailed = bool(request.return_token_ids) or bool(request.logprobs)
        self._begun = [False] * len(plan)
        self._before = [f'{self._envelope.head}{{"index": {i}, "delta": {{"content": ' for i in range(len(plan))]
        self._behind = '}, "logprobs": null, "finish_reason": null}]'

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """One event, or none for text that is still held back; the role comes before a choice's first."""
        opening = b""
        if not self._begun[index]:
            self._begun[index] = True
            opening = self._opening(index)
        suffix = self._suffixes.next(index, len(delta.token_ids))
        if not self._detailed and delta.finish is None:
            if not delta.text:
                return opening
            return opening + f"{self._before[index]}{json.dumps(delta.text)}{self._behind}{suffix}".encode()
        choice: dict[str, object] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": {"content": self._dialect.logprobs(delta), "refusal": None} if self._request.logprobs else None,
            **choice_end(delta.finish),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish is None:
            return opening + self._envelope.chunk(choice, suffix)
        self._totals.add(index, delta.finish)
        return opening + self._envelope.chunk(choice, suffix, tandem_member(delta.finish.summary))

    def closing(self) -> bytes:
        """The usage chunk where asked for, and [DONE]."""
        if not self._request.include_usage:
            return DONE
        return self._envelope.usage_chunk(self._totals.usage(), self._totals.extension()) + DONE

    def _opening(self, index: int) -> bytes:
        suffix = self._suffixes.next(index)
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = start_member(self._plan[index])
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = self._plan[index].prompt_token_ids
        return self._envelope.chunk(choice, suffix, extra)


class ChatBody:
    """A chat completion as one JSON body."""

    def __init__(self, dialect: Chat, request: ChatRequest, plan: Sequence[Request], request_id: str) -> None:
        self._dialect = dialect
        self._request = request
        self._plan = plan
        self._id = f"chatcmpl-{request_id}"
        self._texts: list[list[str]] = [[] for _ in plan]
        self._logprobs: list[list[object]] = [[] for _ in plan]
        self._token_ids: list[list[int]] = [[] for _ in plan]
        self._ends: list[dict[str, object]] = [{} for _ in plan]
        self._totals = Totals(plan, len(plan))

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta."""
        self._texts[index].append(delta.text)
        self._token_ids[index] += delta.token_ids
        if self._request.logprobs:
            self._logprobs[index] += self._dialect.logprobs(delta)
        if delta.finish is not None:
            self._totals.add(index, delta.finish)
            self._ends[index] = choice_end(delta.finish)

    def body(self) -> bytes:
        """OpenAI's `chat.completion` object."""
        response: dict[str, object] = {
            "id": self._id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._dialect.model_name,
            "choices": [self._choice(index) for index in range(len(self._plan))],
            "usage": self._totals.usage(),
            **self._totals.extension(),
        }
        if self._request.return_token_ids:
            response["prompt_token_ids"] = self._plan[0].prompt_token_ids
        return json.dumps(response).encode()

    def _choice(self, index: int) -> dict[str, object]:
        message = {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
        logprobs = {"content": self._logprobs[index], "refusal": None} if self._request.logprobs else None
        choice = {"index": index, "message": message, "logprobs": logprobs, **self._ends[index]}
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return {**choice, **self._totals.choice_extension(index)}
