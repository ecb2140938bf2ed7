"""The bodies of OpenAI's completion and chat requests, strictly typed, with vLLM's common extensions.

Every field may be null, which means absent. Bounds of sampling fields are SamplingParams' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.dispatch.request import TextOptions
from services.router.edge.http.openai.chat_messages import Message, Tool, ToolChoice
from services.router.edge.http.openai.structure_fields import StructureFields
from services.router.edge.http.openai.unsupported import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    STREAM_OPTION_FIELDS,
    refuse_extra,
    refuse_unsupported,
)
from services.router.edge.http.validation import STRICT, StringList, TokenIdList, TokenIdLists, explained, parse_body
from services.router.edge.scheduling import MAX_PRIORITY
from services.router.edge.text.generation_defaults import GenerationDefaults
from shared.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shared.errors import InvalidRequest, brief

MAX_N = 128
MAX_METADATA = 16

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResumedChoice(BaseModel):
    """What the client has of one choice."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    token_ids: TokenIdList = Field(default_factory=list)
    num_chars: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    finish_reason: Literal["stop", "length"] | None = None


class ResumeBody(BaseModel):
    """`resume`: the rest of an answer whose stream broke."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    choices: Annotated[list[ResumedChoice], Field(fail_fast=True, min_length=1)]


class SamplingFields(StructureFields):
    """How tokens are chosen: fields that all endpoints for answers share."""

    model_config = STRICT

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | StringList | None = None
    stop_token_ids: TokenIdList | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: StringList | None = None

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: GenerationDefaults
    ) -> SamplingParams:
        """As the core's value object, with the model's defaults; raises InvalidRequest naming the field."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's other way to say "off"
            given["top_k"] = 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **{**defaults.given, **given},
            seed=None if self.seed == -1 else self.seed,  # vLLM's way to say "any"
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias or {}),
            structured_output=self.structured_output(),
        )


class CommonRequest(SamplingFields):
    """Fields that both endpoints share."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    max_tokens: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    user: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    resume: ResumeBody | None = None

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
    def resumed_choices(self) -> tuple[ResumedChoice, ...]:
        """What the client has of each choice; empty for a request that begins."""
        return tuple(self.resume.choices) if self.resume is not None else ()

    @property
    def text_options(self) -> TextOptions:
        """How tokens become text."""
        return TextOptions(self.skip_special_tokens is not False, bool(self.include_stop_str_in_output))


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | TokenIdList | StringList | TokenIdLists
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def asks_of_prompt(self) -> bool:
        """Whether the answer says something of the prompt itself."""
        return bool(self.echo) or self.prompt_logprobs is not None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives for each token of the prompt; with `echo` the prompt is a part of what `logprobs` describes."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs


class ChatRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        """Of both fields the smaller one."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """By token id, as the core takes them."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidRequest(
                f"logit_bias must have token ids as its keys, got {brief(key, 40)!r}", field="logit_bias"
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(CompletionRequest, body)
    request.check_supported(COMPLETION_FIELDS)
    if request.max_tokens == 0 and not request.asks_of_prompt:
        raise InvalidRequest(
            "max_tokens must be at least 1, or 0 with echo or prompt_logprobs", field="max_tokens", limit=1
        )
    return request


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
