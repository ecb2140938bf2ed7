"""The body of `POST /v1/messages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from services.router.edge.http.bodies import STRICT, StringList, parse_body
from services.router.edge.http.openai.unsupported import refuse_extra
from services.router.edge.scheduling import RETENTIONS
from shared.errors import InvalidRequest

MESSAGES_FIELDS: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
}
"""Fields that are refused unless they ask for nothing."""

Blocks = Annotated[list["Block"], Field(fail_fast=True)]


class CacheControl(BaseModel):
    """How long the prompt is kept after each use. Prefixes are always cached, and whole: its place does not matter."""

    model_config = STRICT

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(BaseModel):
    """A block of content: text, thinking, a call or its result."""

    model_config = STRICT

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Blocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class MessageParam(BaseModel):
    """One message."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class AnthropicTool(BaseModel):
    """One of `tools`."""

    model_config = STRICT

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(BaseModel):
    """`tool_choice`."""

    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """`thinking`. The token budget is accepted and not enforced."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: str | None = None


class OutputFormat(BaseModel):
    """`output_config.format`: JSON of a schema."""

    model_config = STRICT

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`: what the answer looks like, and how much the model reasons before it."""

    model_config = STRICT

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(BaseModel):
    """The body of `POST /v1/messages/count_tokens`, and what all of these have."""

    model_config = STRICT

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @property
    def retention(self) -> str | None:
        """The longest `ttl` of a `cache_control`, wherever it stands; None without one."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marked = [self, *(self.tools or ()), *blocks, *(part for block in blocks for part in _parts(block))]
        asked = {item.cache_control.ttl for item in marked if item.cache_control is not None}
        return max(asked, key=RETENTIONS.__getitem__, default=None)


class MessagesRequest(CountRequest):
    """The body."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StringList | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None


def _parts(block: Block) -> list[Block]:
    """The content blocks of a call's result."""
    return block.content if isinstance(block.content, list) else []


def parse_messages(body: bytes) -> MessagesRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(MessagesRequest, body)
    _check(request)
    return request


def parse_count(body: bytes) -> CountRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(CountRequest, body)
    _check(request)
    return request


def _check(request: CountRequest) -> None:
    refuse_extra(request, MESSAGES_FIELDS)
    choice = request.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name goes with type 'tool', and must be there", field="tool_choice")
