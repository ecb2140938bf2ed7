"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from services.router.dispatch.request import Request
from services.router.edge.answer.families import CALL_FORMATS, AnswerFormats
from services.router.edge.answer.reader import ToolUse
from services.router.edge.http.answer_parts import AnswerParts, answer_parts, kept_special
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.chat_messages import tool_use
from services.router.edge.http.openai.chat_writers import ChatBody, ChatStream
from services.router.edge.http.openai.forced_calls import call_or_answer, calls_structure
from services.router.edge.http.openai.logprobs import chat_logprobs, prompt_logprobs
from services.router.edge.http.openai.parsed_request import BodyWriter, ParsedRequest, StreamWriter
from services.router.edge.http.openai.schemas import ChatRequest, parse_chat
from services.router.edge.input_processor import ChatPrompt, PromptOptions
from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from services.router.edge.text.output_processor import OutputDelta
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer

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

    def parsed(self, request: ChatRequest) -> ParsedChat:
        """A body that was checked; raises InvalidRequest naming the field."""
        tools = request.tools or []
        use = tool_use(tools, request.tool_choice, request.parallel_tool_calls)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = request.sampling_params(request.max_answer_tokens, logprobs, self._defaults)
        sampling = replace(sampling, prompt_logprobs=request.prompt_logprobs)
        if use is not None and use.is_forced:
            if sampling.structured_output is not None:
                field = sampling.structured_output.source
                raise InvalidRequest(f"{field} excludes tool_choice: an answer cannot match both", field=field)
            sampling = replace(sampling, structured_output=calls_structure(tools, use))
        elif use is not None and sampling.structured_output is not None:
            structure = call_or_answer(tools, use, sampling.structured_output, self._formats.calls, self._tokenizer)
            sampling = replace(sampling, structured_output=structure)
        prompt = ChatPrompt(
            [message.for_template(f"messages[{i}]") for i, message in enumerate(request.messages)],
            tools=[tool.for_template() for tool in tools] if use is not None else [],
            variables=request.chat_template_kwargs or {},
            reasoning_effort=request.reasoning_effort,
            verbosity=request.verbosity,
        )
        text = replace(request.text_options, kept_special=kept_special(use, self._formats))
        return ParsedChat(
            prompts=[prompt],
            n=request.n or 1,
            sampling=sampling,
            default_max_tokens=None,
            options=PromptOptions(request.truncate_prompt_tokens, tuple(request.bad_words or ()), text),
            priority=request.priority,
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

    def logprobs(self, delta: OutputDelta) -> list[object]:
        """`logprobs.content` of a delta."""
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs)


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
