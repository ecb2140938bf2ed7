"""The bodies of OpenAI's completion and chat requests, strictly typed, with vLLM's common extensions.

Every field may be null, which means absent. Bounds of sampling fields are SamplingParams' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.edge.http.structure_fields import StructureFields
from services.router.edge.http.unsupported import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
    STREAM_OPTION_FIELDS,
    refuse_unsupported,
)
from shared.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shared.errors import InvalidRequest

MAX_N = 128
MAX_JSON_DEPTH = 201
"""The parser's own limit."""

# One wrong element is enough: a list of a million of them must not become a million error objects.
TokenIdList = Annotated[list[int], Field(fail_fast=True)]
StringList = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIdList], Field(fail_fast=True)]

_STRICT = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = _STRICT

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


class CommonRequest(StructureFields):
    """Fields that both endpoints share."""

    model_config = _STRICT

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    max_tokens: int | None = None
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
    return_token_ids: bool | None = None
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
        refuse_unsupported(self.model_extra, known)
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

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The sampling fields as the core's value object; raises InvalidRequest naming the field."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "min_tokens",
            "ignore_eos",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's other way to say "off"
            given["top_k"] = 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structured_output=self.structured_output(),
        )


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | TokenIdList | StringList | TokenIdLists
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class TextPart(BaseModel):
    """One part of a message's content; only text is served."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message."""

    model_config = _STRICT

    role: str = Field(min_length=1)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What the chat template sees; text parts stand on lines of their own."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


R = TypeVar("R", bound=CommonRequest)


def _parse(cls: type[R], body: bytes) -> R:
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> InvalidRequest:
    """The first field at fault, with everything that its type would have allowed."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:
            return InvalidRequest(
                f"the body is not valid JSON here: it is nested deeper than {MAX_JSON_DEPTH} levels",
                field="body",
                limit=MAX_JSON_DEPTH,
            )
        return InvalidRequest(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object")
    field = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return InvalidRequest(f"{field} is missing", field=field)
    same = [problem for problem in problems if problem["loc"][0] == field]
    reasons = dict.fromkeys(f"{_place(p['loc'])}: {p['msg'][:1].lower()}{p['msg'][1:]}" for p in same)
    return InvalidRequest("; or ".join(reasons), field=field)


def _place(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from a location, without the names of the union members tried."""
    place = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            place += f".{part}"
    return place


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest naming the field."""
    request = _parse(CompletionRequest, body)
    request.check_supported(COMPLETION_FIELDS)
    if request.echo and request.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported: prompt tokens have none here", field="echo")
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest naming the field."""
    request = _parse(ChatRequest, body)
    request.check_supported(CHAT_FIELDS)
    for i, message in enumerate(request.messages):
        refuse_unsupported(message.model_extra, MESSAGE_FIELDS, f"messages[{i}].")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens exclude each other", field="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return request
