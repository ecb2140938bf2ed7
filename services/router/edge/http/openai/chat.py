"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.answer.families import CALL_FORMATS, AnswerFormats
from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.http.answer_parts import (
    DONE,
    AnswerParts,
    ChunkSuffix,
    Envelope,
    Totals,
    answer_parts,
    choice_end,
    kept_special,
    start_member,
)
from services.router.edge.http.endpoint import BodyWriter, ParsedRequest, StreamWriter
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.forced_calls import call_or_answer, check_beside_forced_calls, forced_structure
from services.router.edge.http.openai.logprobs import chat_logprobs, prompt_logprobs
from services.router.edge.http.openai.schemas import ChatRequest, parse_chat, tool_use
from services.router.edge.input_processor import PromptOptions
from services.router.edge.output_stream import OutputDelta, OutputFinish
from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from services.router.views.timings import tandem_member
from shared.model.text.tokenizer import Tokenizer


class ChatStream:
    """A chat completion as server-sent events."""

    def __init__(
        self,
        dialect: Chat,
        request: ChatRequest,
        plan: Sequence[Request],
        request_id: str,
        answers: Sequence[AnswerParts],
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._plan = plan
        self._answers = answers
        self._totals = Totals(plan, len(plan))
        name = plan[0].adapter_name or dialect.model_name
        self._envelope = Envelope(f"chatcmpl-{request_id}", "chat.completion.chunk", name)
        self._suffixes = ChunkSuffix(plan, include_usage=request.include_usage, continuous=request.continuous_usage)
        self._detailed = bool(request.return_token_ids) or bool(request.logprobs)
        self._begun = [False] * len(plan)
        self._before = [f'{self._envelope.head}{{"index": {i}, "delta": {{"content": ' for i in range(len(plan))]
        self._behind = '}, "logprobs": null, "finish_reason": null}]'

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """What a delta brings, or none for text that is still held back; the role comes before a choice's first."""
        opening = b""
        if not self._begun[index]:
            self._begun[index] = True
            opening = self._opening(index)
        answer = self._answers[index]
        if answer.reader is not None:
            return opening + self._read(index, delta)
        suffix = self._suffixes.next(index, len(delta.token_ids))
        if not self._detailed and delta.finish is None:
            if not delta.text:
                return opening
            return opening + f"{self._before[index]}{json.dumps(delta.text)}{self._behind}{suffix}".encode()
        return opening + self._detailed_chunk(index, {"content": delta.text} if delta.text else {}, delta, suffix)

    def closing(self) -> bytes:
        """The usage chunk where asked for, and [DONE]."""
        if not self._request.include_usage:
            return DONE
        return self._envelope.usage_chunk(self._totals.usage(), self._totals.extension()) + DONE

    def _read(self, index: int, delta: OutputDelta) -> bytes:
        """An event for each part found; details of the tokens and the end go with the last."""
        answer = self._answers[index]
        found = answer.add(delta)
        if self._request.include_reasoning is False:
            found = [event for event in found if not isinstance(event, Reasoning)]
        parts = [_delta_member(event, answer) for event in found]
        is_last_detailed = self._detailed or delta.finish is not None
        if is_last_detailed and not parts:
            parts = [{}]
        plain = parts[:-1] if is_last_detailed else parts
        written = [
            self._envelope.chunk(
                {"index": index, "delta": part, "logprobs": None, "finish_reason": None}, self._suffixes.next(index)
            )
            for part in plain
        ]
        suffix = self._suffixes.next(index, len(delta.token_ids))
        if is_last_detailed:
            written.append(self._detailed_chunk(index, parts[-1], delta, suffix))
        return b"".join(written)

    def _detailed_chunk(self, index: int, part: dict[str, object], delta: OutputDelta, suffix: str) -> bytes:
        choice: dict[str, object] = {
            "index": index,
            "delta": part,
            "logprobs": {"content": self._logprobs(delta), "refusal": None} if self._request.logprobs else None,
            **_end(delta.finish, self._answers[index]),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish is None:
            return self._envelope.chunk(choice, suffix)
        self._totals.add(index, delta.finish)
        return self._envelope.chunk(choice, suffix, tandem_member(delta.finish.record))

    def _logprobs(self, delta: OutputDelta) -> list[object]:
        return self._dialect.logprobs(delta, self._request.return_tokens_as_token_ids)

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

    def __init__(
        self,
        dialect: Chat,
        request: ChatRequest,
        plan: Sequence[Request],
        request_id: str,
        answers: Sequence[AnswerParts],
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._plan = plan
        self._id = f"chatcmpl-{request_id}"
        self._answers = answers
        self._logprobs: list[list[object]] = [[] for _ in plan]
        self._token_ids: list[list[int]] = [[] for _ in plan]
        self._ends: list[dict[str, object]] = [{} for _ in plan]
        self._prompt_logprobs: list[dict[str, object] | None] = []
        self._totals = Totals(plan, len(plan))

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta."""
        self._answers[index].add(delta)
        self._token_ids[index] += delta.token_ids
        if delta.prompt_logprobs and not self._prompt_logprobs:
            self._prompt_logprobs = self._dialect.prompt_logprobs(self._plan[index], delta)
        if self._request.logprobs:
            self._logprobs[index] += self._dialect.logprobs(delta, self._request.return_tokens_as_token_ids)
        if delta.finish is not None:
            self._totals.add(index, delta.finish)
            self._ends[index] = _end(delta.finish, self._answers[index])

    def body(self) -> bytes:
        """OpenAI's `chat.completion` object."""
        response: dict[str, object] = {
            "id": self._id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._plan[0].adapter_name or self._dialect.model_name,
            "choices": [self._choice(index) for index in range(len(self._plan))],
            "usage": self._totals.usage(),
            **self._totals.extension(),
        }
        if self._request.return_token_ids:
            response["prompt_token_ids"] = self._plan[0].prompt_token_ids
        if self._request.prompt_logprobs is not None:
            response["prompt_logprobs"] = self._prompt_logprobs or [None]
        return json.dumps(response).encode()

    def _choice(self, index: int) -> dict[str, object]:
        logprobs = {"content": self._logprobs[index], "refusal": None} if self._request.logprobs else None
        choice = {"index": index, "message": self._message(index), "logprobs": logprobs, **self._ends[index]}
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return {**choice, **self._totals.choice_extension(index)}

    def _message(self, index: int) -> dict[str, object]:
        answer = self._answers[index]
        is_silent = not answer.text and bool(answer.calls or answer.reasoning)
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if is_silent else answer.text,
            "refusal": None,
        }
        if answer.reasoning and self._request.include_reasoning is not False:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return message


def _delta_member(event: Event, answer: AnswerParts) -> dict[str, object]:
    """An event as a chunk's `delta`."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegun(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": answer.calls[index].id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _end(finish: OutputFinish | None, answer: AnswerParts) -> dict[str, object]:
    """As `choice_end`, with finish_reason tool_calls for an answer that stopped to call a tool."""
    end = choice_end(finish)
    if finish is not None and finish.reason is FinishReason.STOP and answer.calls:
        end["finish_reason"] = "tool_calls"
    return end


PLAIN = AnswerFormats(CALL_FORMATS["hermes"], reasoning=None)


class Chat:
    """The endpoint's dialect."""

    errors = OpenAIErrors()

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_name: str,
        formats: AnswerFormats = PLAIN,
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> None:
        self._tokenizer = tokenizer
        self.model_name = model_name
        self._formats = formats
        self._defaults = defaults

    def parse(self, body: bytes) -> ParsedChat:
        """Raises InvalidRequest naming the field."""
        return self.parsed(parse_chat(body))

    def parsed(self, request: ChatRequest, callable_names: frozenset[str] | None = None) -> ParsedChat:
        """A body that was checked; raises InvalidRequest naming the field. `callable_names`: the tools that may be
        called, of those that the model sees; None: all."""
        seen = request.tools or []
        tools = [tool for tool in seen if callable_names is None or tool.for_name in callable_names]
        use = tool_use(tools, request.tool_choice, request.parallel_tool_calls)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = request.sampling_params(request.max_answer_tokens, logprobs, self._defaults, request.n or 1)
        sampling = replace(sampling, prompt_logprobs=request.prompt_logprobs)
        if use is not None and use.is_forced:
            check_beside_forced_calls(sampling.structured_output)
            structure = forced_structure(tools, use, self._formats.calls, self._tokenizer)
            sampling = replace(sampling, structured_output=structure)
        elif use is not None and sampling.structured_output is not None:
            structure = call_or_answer(tools, use, sampling.structured_output, self._formats.calls, self._tokenizer)
            sampling = replace(sampling, structured_output=structure)
        prompt = replace(
            request.chat_prompt(request.messages, [tool.for_template() for tool in seen] if use is not None else []),
            reasoning_effort=request.reasoning_effort,
            verbosity=request.verbosity,
        )
        text = replace(request.text_options, kept_special=kept_special(use, self._formats))
        return ParsedChat(
            prompts=[prompt],
            n=request.n or 1,
            num_computed=request.best_of or request.n or 1,
            sampling=sampling,
            default_max_tokens=None,
            options=PromptOptions(request.truncate_prompt_tokens, tuple(request.bad_words or ()), text),
            session=request.session,
            priority=request.asked_priority,
            retain_s=request.retain_s,
            model=request.model or "",
            cache_salt=request.cache_salt or "",
            request_id=request.request_id or "",
            stream=bool(request.stream),
            resumed=request.resumed_choices,
            dialect=self,
            body=request,
            tools=use,
        )

    def answers(self, plan: Sequence[Request], tools: ToolUse | None) -> list[AnswerParts]:
        """Where the parts of each choice's answer go."""
        return answer_parts(plan, tools, self._formats, self._tokenizer)

    def prompt_logprobs(self, request: Request, delta: OutputDelta) -> list[dict[str, object] | None]:
        """`prompt_logprobs` of an answer's first delta."""
        return prompt_logprobs(self._tokenizer, request.prompt_token_ids, delta.prompt_logprobs)

    def logprobs(self, delta: OutputDelta, as_ids: bool | None = None) -> list[object]:
        """`logprobs.content` of a delta; `as_ids` names tokens by their ids."""
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, as_ids)


@dataclass(frozen=True, slots=True)
class ParsedChat(ParsedRequest):
    """See `ParsedRequest`."""

    dialect: Chat
    body: ChatRequest
    tools: ToolUse | None

    @classmethod
    def of(cls, chat: ParsedChat, **more: Any) -> Self:
        """The same request at an endpoint that answers in another shape; `more` are that endpoint's own fields."""
        return cls(**{item.name: getattr(chat, item.name) for item in fields(chat)}, **more)

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> StreamWriter:
        """See `ParsedRequest`."""
        return ChatStream(self.dialect, self.body, plan, request_id, self.dialect.answers(plan, self.tools))

    def body_writer(self, plan: Sequence[Request], request_id: str) -> BodyWriter:
        """See `ParsedRequest`."""
        return ChatBody(self.dialect, self.body, plan, request_id, self.dialect.answers(plan, self.tools))
