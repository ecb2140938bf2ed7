"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.edge.http.bodies import STRICT, StringList, parse_body
from services.router.edge.http.openai.chat_messages import ContentPart
from services.router.edge.http.openai.schemas import MAX_METADATA, Retention
from services.router.edge.http.openai.unsupported import refuse_extra, refuse_unsupported
from shared.engine.sampling_params import MAX_LOGPROBS
from shared.errors import InvalidRequest

RESPONSE_FIELDS: dict[str, tuple[object, ...]] = {
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
}
"""Fields that are refused unless they ask for nothing."""

KEPT_FIELDS = ("metadata", "store")
"""Fields that do something here, where responses are kept, and nothing at other endpoints."""

_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
Parts = Annotated[list[ContentPart], Field(fail_fast=True)]


class ReasoningPart(BaseModel):
    """A part of an earlier answer's reasoning."""

    model_config = STRICT

    type: str
    text: str = ""


class InputItem(BaseModel):
    """One of `input`: a message, a call, a call's answer or reasoning of an earlier answer."""

    model_config = STRICT

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart | ReasoningPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    server_label: str | None = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    error: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=512)] | None = None
    id: str | None = None


class ToolFilter(BaseModel):
    """Some of a server's tools: those named, or those that it calls read-only; with both, what is in both."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tool_names: Annotated[list[str], Field(fail_fast=True, max_length=512)] | None = None
    read_only: bool | None = None

    def has(self, name: str, *, is_read_only: bool) -> bool:
        """Whether a tool is one of them."""
        named = self.tool_names is None or name in self.tool_names
        return named and (self.read_only is None or self.read_only == is_read_only)


Approval = Literal["always", "never"] | dict[Literal["always", "never"], ToolFilter]
"""Which calls of a server's tools the client approves first: those that are not named as never."""


class ResponseTool(BaseModel):
    """One of `tools`, whose function stands in the tool itself, or a remote MCP server."""

    model_config = STRICT

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_label: str | None = Field(default=None, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    server_url: str | None = Field(default=None, max_length=2048)
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: Annotated[list[str], Field(fail_fast=True, max_length=512)] | ToolFilter | None = None
    require_approval: Approval | None = None

    @property
    def wanted_tools(self) -> ToolFilter | None:
        """`allowed_tools`; None: all."""
        return ToolFilter(tool_names=self.allowed_tools) if isinstance(self.allowed_tools, list) else self.allowed_tools


class ToolName(BaseModel):
    """The tool that must be called."""

    model_config = STRICT

    type: Literal["function"]
    name: str


class ServerToolName(BaseModel):
    """The tool of an MCP server that must be called."""

    model_config = STRICT

    type: Literal["mcp"]
    server_label: str
    name: str


class AllowedTool(BaseModel):
    """One of `tool_choice.tools`."""

    model_config = STRICT

    type: Literal["function", "mcp"]
    name: str | None = None
    server_label: str | None = None


class AllowedTools(BaseModel):
    """The tools that may be called, of those that the model sees."""

    model_config = STRICT

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=512)]


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = STRICT

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(BaseModel):
    """`text`."""

    model_config = STRICT

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(BaseModel):
    """`reasoning`."""

    model_config = STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ConversationId(BaseModel):
    """`conversation` as an object."""

    model_config = STRICT

    id: str


class ResponseRequest(BaseModel):
    """The body."""

    model_config = STRICT

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | ServerToolName | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: StringList | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    background: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: str | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def items(self) -> list[InputItem]:
        """`input` as items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def conversation_id(self) -> str | None:
        """The conversation that is continued."""
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return _INCLUDED[0] in (self.include or ()) or bool(self.top_logprobs)


def parse_response(body: bytes) -> ResponseRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(ResponseRequest, body)
    refuse_extra(request, RESPONSE_FIELDS)
    for name in request.include or ():
        if name not in _INCLUDED:
            raise InvalidRequest(f"include: {name[:80]!r} is not served here", field="include")
    summary = request.reasoning and (request.reasoning.summary or request.reasoning.generate_summary)
    if summary not in (None, "auto"):
        raise InvalidRequest("reasoning.summary is not served here: reasoning comes whole", field="reasoning.summary")
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest("previous_response_id excludes conversation", field="previous_response_id")
    if request.background and request.store is False:
        raise InvalidRequest("background needs store: its response is read later", field="background")
    if request.background and request.stream:
        raise InvalidRequest("background excludes stream: its response is read later", field="background")
    refuse_unsupported(request.stream_options, {"include_obfuscation": (False,)}, "stream_options.")
    return request
