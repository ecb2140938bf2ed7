"""The body of OpenAI's chat request, strictly typed, with vLLM's common extensions, and what completions share of it.

Every field may be null, which means absent. Bounds of sampling fields are SamplingParams' own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.dispatch.request import FinishReason, Resume, TextOptions
from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.http.bodies import STRICT, TokenIdList, explained, parse_body
from services.router.edge.http.openai.chat_messages import Message, TemplateFields
from services.router.edge.http.openai.sampling_fields import MAX_N, SamplingFields
from services.router.edge.http.openai.unsupported import (
    CHAT_FIELDS,
    STREAM_OPTION_FIELDS,
    refuse_extra,
    refuse_unsupported,
)
from services.router.edge.scheduling import MAX_PRIORITY, RETENTIONS, TIERS
from shared.engine.sampling_params import MAX_LOGPROBS
from shared.errors import InvalidRequest, brief
from shared.model.text.template_traits import JsonValue

MAX_METADATA = 16
MAX_TOOLS = 512
MAX_TOOL_NAME_LEN = 128


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON Schema."""

    model_config = STRICT

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_LEN, pattern=r"^[a-zA-Z0-9_.:/-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One of `tools`."""

    model_config = STRICT

    type: str
    function: FunctionTool | None = None

    @property
    def for_name(self) -> str:
        """Its function's name; empty where it has none."""
        return self.function.name if self.function is not None else ""

    def checked(self, place: str) -> FunctionTool:
        """Its function; raises InvalidRequest (`tools`) for another kind of tool."""
        if self.type != "function":
            raise InvalidRequest(
                f"{place}.type {brief(self.type, 40)!r} is not served here, only 'function' is", field="tools"
            )
        if self.function is None:
            raise InvalidRequest(f"{place}.function is missing", field="tools")
        return self.function

    def for_template(self) -> dict[str, JsonValue]:
        """The form that chat templates read."""
        assert self.function is not None
        function: dict[str, JsonValue] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedFunction(BaseModel):
    """The function of a named tool choice."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str


class NamedChoice(BaseModel):
    """A tool that must be called."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """What the answer may call; None where it may call nothing. Raises InvalidRequest naming `tools` or
    `tool_choice`, also for a tool that does not exist."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} entries, at most {MAX_TOOLS} are served", field="tools", limit=MAX_TOOLS
        )
    functions = [tool.checked(f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    schemas = {function.name: function.parameters or {} for function in functions}
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidRequest(f"tools names {twice!r} twice", field="tools")
    if not names:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if choice == "none":
        return None
    max_calls = 1 if parallel is False else None
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {brief(name, 80)!r}, which tools does not have: {brief(', '.join(names), 200)}",
                field="tool_choice",
                value=brief(name, 80),
            )
        return ToolUse(frozenset(names), named=name, max_calls=1, schemas=schemas)
    return ToolUse(frozenset(names), required=choice == "required", max_calls=max_calls, schemas=schemas)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResumedChoice(BaseModel):
    """The part of one choice that the client has from an earlier call."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    token_ids: TokenIdList = Field(default_factory=list)
    num_chars: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    sampler_version: int = Field(default=0, ge=0)
    finish_reason: Literal["stop", "length"] | None = None

    def resumed(self) -> Resume:
        """The core's value object of these fields."""
        ended = None if self.finish_reason is None else FinishReason(self.finish_reason)
        return Resume(tuple(self.token_ids), self.num_chars, ended, self.sampler_version)


class ResumeBody(BaseModel):
    """`resume`: the rest of an answer whose stream broke."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    choices: Annotated[list[ResumedChoice], Field(fail_fast=True, min_length=1)]


Retention = Literal["in-memory", "in_memory", "5m", "1h", "24h"]
"""Retention of a prefix; OpenAI writes the first one both ways, and has no 5m and 1h."""


def session_of_key(key: str | None) -> str:
    """The session of a `prompt_cache_key`; empty without one."""
    return f"key-{hashlib.sha256(key.encode(errors='replace')).hexdigest()}" if key else ""


class CommonRequest(SamplingFields):
    """Fields that both endpoints share."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    max_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name tokens `token_id:7`, not by their texts, which several may share."""
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    resume: ResumeBody | None = None

    @property
    def session(self) -> str:
        """By `prompt_cache_key`, whatever that holds: calls with one key are sent where its last one was."""
        return session_of_key(self.prompt_cache_key)

    @property
    def retain_s(self) -> float | None:
        """What `prompt_cache_retention` says: how long its prefix is kept after each use. Seconds; None: not said."""
        return None if self.prompt_cache_retention is None else RETENTIONS[self.prompt_cache_retention]

    @property
    def asked_priority(self) -> int | None:
        """vLLM's priority, lower first: `priority`, else what `service_tier` stands for."""
        if self.priority is not None or self.service_tier not in TIERS:
            return self.priority
        return -TIERS[self.service_tier]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries its choice's usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check_supported(self, known: Mapping[str, tuple[object, ...]]) -> None:
        """Raises InvalidRequest for what we know and do not do."""
        refuse_extra(self, known)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for as many as fit", field="truncate_prompt_tokens"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs do not go with stream", field="prompt_logprobs")
        self.check_best(self.n or 1, is_stream=bool(self.stream))
        if self.resume is not None and not self.stream:
            raise InvalidRequest("resume needs stream to be true", field="resume")
        if self.stream_options is not None:
            refuse_unsupported(self.stream_options.model_extra, STREAM_OPTION_FIELDS, "stream_options.")
            if not self.stream:
                raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
            if self.continuous_usage and not self.include_usage:
                field = "stream_options.continuous_usage_stats"
                raise InvalidRequest(f"{field} needs stream_options.include_usage to be true", field=field)

    @property
    def resumed_choices(self) -> tuple[tuple[Resume, int | None], ...]:
        """What the client has of each choice, and its seed; empty for a request that begins."""
        return tuple((choice.resumed(), choice.seed) for choice in self.resume.choices) if self.resume else ()

    @property
    def text_options(self) -> TextOptions:
        """How tokens become text."""
        return TextOptions(self.skip_special_tokens is not False, bool(self.include_stop_str_in_output))


class ChatRequest(CommonRequest, TemplateFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        """The smaller one of both fields."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(ChatRequest, body)
    _check_chat(request)
    return request


def chat_of(values: Mapping[str, object]) -> ChatRequest:
    """The request of another endpoint's body: the fields that are not None. Raises InvalidRequest naming the field."""
    try:
        request = ChatRequest.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise explained(error) from None
    _check_chat(request)
    return request


def _check_chat(request: ChatRequest) -> None:
    """Raises InvalidRequest for what is not served, or does not go together."""
    request.check_supported(CHAT_FIELDS)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
