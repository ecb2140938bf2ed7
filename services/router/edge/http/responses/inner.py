"""A response's body to the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from services.router.edge.http.openai.chat_messages import ContentPart
from services.router.edge.http.openai.schemas import ChatRequest, chat_of
from services.router.edge.http.responses.mcp.servers import ServerTool
from services.router.edge.http.responses.schemas import (
    AllowedTools,
    InputItem,
    ResponseRequest,
    ResponseTool,
    ServerToolName,
    TextFormat,
    ToolName,
)
from shared.errors import InvalidRequest, brief

NO_TOOLS: Mapping[str, ServerTool] = MappingProxyType({})
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
NAMES |= {"response_format.json_schema": "text.format", "response_format": "text.format"}
NAMES |= {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
"""What the chat request calls otherwise, the longer before its beginning."""


def chat_request(
    request: ResponseRequest,
    earlier: Sequence[InputItem] = (),
    later: Sequence[InputItem] = (),
    server_tools: Mapping[str, ServerTool] = NO_TOOLS,
) -> ChatRequest:
    """`earlier`: the items of the conversation before this call; `later`: those that this call has brought already;
    `server_tools`: of MCP servers, by name. Raises InvalidRequest naming the field, some in the chat's words: see
    `NAMES`."""
    tools = [_tool(tool, i) for i, tool in enumerate(request.tools or ()) if tool.type != "mcp"]
    fields: dict[str, Any] = {
        "messages": _messages(request, earlier, later),
        "max_completion_tokens": request.max_output_tokens,
        "tools": [*tools, *map(_server_tool, server_tools.values())],
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": request.text.verbosity if request.text else None,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
    }
    for name in (
        "model",
        "temperature",
        "top_p",
        "parallel_tool_calls",
        "stream",
        "metadata",
        "user",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ):
        fields[name] = getattr(request, name)
    choice = request.tool_choice
    if isinstance(choice, ToolName | ServerToolName):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = choice.mode if isinstance(choice, AllowedTools) else choice
    if request.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format(request.text.format)
    return chat_of(fields)


def callable_names(request: ResponseRequest, server_tools: Mapping[str, ServerTool]) -> frozenset[str] | None:
    """The tools that `tool_choice` allows, of those that the model sees; None: all. Raises InvalidRequest
    (`tool_choice`) for one that there is not."""
    choice = request.tool_choice
    if not isinstance(choice, AllowedTools):
        return None
    functions = {tool.name for tool in request.tools or () if tool.type == "function" and tool.name}
    found: set[str] = set()
    for item in choice.tools:
        if item.type == "function":
            names = functions & {item.name}
        else:
            of_server = {name for name, tool in server_tools.items() if tool.label == item.server_label}
            names = {name for name in of_server if item.name in (None, name)}
        if not names:
            what = brief(str(item.name or item.server_label), 80)
            raise InvalidRequest(f"tool_choice allows {what!r}, which tools does not have", field="tool_choice")
        found |= {name for name in names if name is not None}
    return frozenset(found)


def _messages(
    request: ResponseRequest, earlier: Sequence[InputItem], later: Sequence[InputItem]
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    return [*messages, *item_messages([*earlier, *request.items, *later], "input", -len(earlier))]


def item_messages(items: Sequence[InputItem], field: str, first: int = 0) -> list[dict[str, Any]]:
    """Items as chat messages; neighbouring calls are one message, and reasoning goes with what follows it. Raises
    InvalidRequest (`field`) for an item that is not served; `first`: the number of the first one there."""
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for i, item in enumerate(items, first):
        if item.type == "reasoning":
            thoughts = "".join(part.text or "" for part in item.content or () if not isinstance(part, str))
            continue
        if item.type in ("mcp_list_tools", "mcp_approval_request"):
            continue  # what the model sees of them are tools, and what came of the request
        if item.type in ("mcp_call", "mcp_approval_response"):
            called = _server_call(item, items, f"{field}[{i}]", field)
            if called and thoughts:
                called[0]["reasoning_content"], thoughts = thoughts, ""
            messages += called
            continue
        message = _message(item, f"{field}[{i}]", field)
        if message["role"] == "assistant" and thoughts:
            message["reasoning_content"] = thoughts
        thoughts = ""
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            if both := [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]:
                last["reasoning_content"] = "\n\n".join(both)
        else:
            messages.append(message)
    return messages


def _server_call(item: InputItem, items: Sequence[InputItem], place: str, field: str) -> list[dict[str, Any]]:
    """A call of a server's tool and what came of it; nothing for one that is approved, since it follows as a call."""
    call = item
    said = item.output if isinstance(item.output, str) else item.error or ""
    if item.type == "mcp_approval_response":
        if item.approve is None:
            raise InvalidRequest(f"{place}.approve is missing", field=field)
        call = approval_request(item, items, place, field)
        if item.approve:
            return []
        said = f"The user did not approve this call. {item.reason or ''}".strip()
    if call.name is None:
        raise InvalidRequest(f"{place}.name is missing", field=field)
    call_id = (call.id or "").rpartition("_")[2][-9:].rjust(9, "0")  # as short as some templates want it
    function = {"name": call.name, "arguments": call.arguments or "{}"}
    return [
        {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": said},
    ]


def approval_request(item: InputItem, items: Sequence[InputItem], place: str, field: str) -> InputItem:
    """What an `mcp_approval_response` answers. Raises InvalidRequest (`field`) where there is none."""
    for other in items:
        if other.type == "mcp_approval_request" and other.id is not None and other.id == item.approval_request_id:
            return other
    raise InvalidRequest(f"{place}.approval_request_id names no mcp_approval_request before it", field=field)


def _message(item: InputItem, place: str, field: str) -> dict[str, Any]:
    if item.type == "message":
        if item.role is None or item.content is None:
            missing = "role" if item.role is None else "content"
            raise InvalidRequest(f"{place}.{missing} is missing", field=field)
        return {"role": item.role, "content": _text(item.content, f"{place}.content")}
    if item.type == "function_call":
        if item.name is None or item.call_id is None:
            missing = "name" if item.name is None else "call_id"
            raise InvalidRequest(f"{place}.{missing} is missing", field=field)
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            missing = "call_id" if item.call_id is None else "output"
            raise InvalidRequest(f"{place}.{missing} is missing", field=field)
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{place}.output")}
    raise InvalidRequest(f"{place}.type {brief(item.type, 40)!r} is not served here", field=field)


def _text(content: str | list[Any], place: str) -> str:
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, ContentPart) else ContentPart(type=part.type, text=part.text) for part in content]
    return "\n".join(part.spoken(f"{place}[{i}]") for i, part in enumerate(parts))


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type == "function" and tool.name is None:
        raise InvalidRequest(f"tools[{index}].name is missing", field="tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": tool.type, "function": function if tool.type == "function" else None}


def _server_tool(given: ServerTool) -> dict[str, Any]:
    tool = given.tool
    function = {"name": tool.name, "description": tool.description or None, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _format(given: TextFormat) -> dict[str, Any]:
    """The chat's `response_format`, where the schema stands a level deeper."""
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name or "answer", "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
