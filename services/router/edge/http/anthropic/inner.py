"""A message's body to the chat request that it becomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.router.edge.http.anthropic.schemas import (
    AnthropicTool,
    Block,
    CountRequest,
    MessageParam,
    MessagesRequest,
    OutputConfig,
)
from services.router.edge.http.openai.schemas import ChatRequest, chat_of
from shared.errors import InvalidRequest, brief

NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of the Messages API, by the chat request's name for the same field."""

_EFFORTS = {"max": "xhigh"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: CountRequest) -> ChatRequest:
    """Raises InvalidRequest naming the field, some in the chat's words: see `NAMES`."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}].content")
    last = messages[-1]
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        # What the client says for the assistant is the beginning of its answer.
        "continue_final_message": last["role"] == "assistant" and not last.get("tool_calls"),
        "tools": [_tool(tool, i) for i, tool in enumerate(request.tools or ())],
    }
    choice = request.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if request.thinking is not None and request.thinking.type != "adaptive":
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking.type == "enabled"}
    if request.output_config is not None:
        fields |= _output(request.output_config)
    if isinstance(request, MessagesRequest):
        fields["max_tokens"] = request.max_tokens
        fields["stop"] = request.stop_sequences
        fields["prompt_cache_retention"] = request.retention
        for name in ("stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(request, name)
    return chat_of(fields)


def _output(config: OutputConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    if config.format is not None:
        named = {"name": "output", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


def _messages(message: MessageParam, place: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, in front of what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        at = f"{place}[{i}]"
        if block.type == "tool_result" and message.role == "user":
            results.append(_result(block, at))
        elif block.type == "tool_use" and message.role == "assistant":
            calls.append(_call(block, at))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue  # encrypted by the provider that made it
        else:
            texts.append(_block_text(block, at))
    said: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        said |= {"tool_calls": calls, "content": said["content"] or None}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    return results + ([said] if texts or calls or thoughts or not results else [])


def _result(block: Block, place: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{place}.tool_use_id is missing", field="messages")
    text = _text(block.content or "", f"{place}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def _call(block: Block, place: str) -> dict[str, Any]:
    if block.name is None or block.id is None:
        missing = "name" if block.name is None else "id"
        raise InvalidRequest(f"{place}.{missing} is missing", field="messages")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: str | Sequence[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{place}[{i}]") for i, block in enumerate(content))


def _block_text(block: Block, place: str) -> str:
    field = place.partition("[")[0].partition(".")[0]
    if block.type != "text":
        raise InvalidRequest(f"{place}.type {brief(block.type, 40)!r} is not served here, text blocks are", field=field)
    if block.text is None:
        raise InvalidRequest(f"{place}.text is missing", field=field)
    return block.text


def _tool(tool: AnthropicTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"tools[{index}].type {brief(tool.type, 40)!r} is not served here, tools of your own are", field="tools"
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
