"""What a response does with MCP servers before its model is asked: their tools are listed, and approved calls made."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.edge.http.mcp.servers import ToolBox, known_tools
from services.router.edge.http.responses.inner import approval_request
from services.router.edge.http.responses.schemas import InputItem, ResponseRequest
from services.router.edge.http.responses.shelf import Item
from shared.errors import InvalidRequest, brief


async def opened(box: ToolBox, request: ResponseRequest, earlier: Sequence[InputItem], max_calls: int) -> list[Item]:
    """Lists the tools that no earlier turn has listed, makes the calls that the input approves, and returns the items
    of both. Raises ToolServerFailed where tools cannot be listed, and InvalidRequest."""
    items = [*earlier, *request.items]
    known = {
        item.server_label: known_tools(item.model_dump())
        for item in items
        if item.type == "mcp_list_tools" and item.server_label is not None
    }
    names = frozenset(tool.name for tool in request.tools or () if tool.type == "function" and tool.name)
    await box.list_tools(known, names)
    made = {item.approval_request_id for item in items if item.type == "mcp_call"}
    approved = [
        (place, item)
        for place, item in enumerate(request.items)
        if item.type == "mcp_approval_response" and item.approve and item.approval_request_id not in made
    ]
    if len(approved) > max_calls:
        raise InvalidRequest(f"input approves {len(approved)} calls, at most {max_calls} are made", field="input")
    found: list[Item] = list(box.listings)
    for place, item in approved:
        asked = approval_request(item, items, f"input[{place}]", "input")
        tool = box.tools.get(asked.name or "")
        if tool is None or tool.label != asked.server_label:
            raise InvalidRequest(
                f"input[{place}] approves a call of {brief(str(asked.name), 80)!r}, which tools does not have",
                field="input",
            )
        arguments = asked.arguments or "{}"
        output, error = await box.servers[tool.label].call(tool.tool.name, arguments)
        found.append(
            {
                "type": "mcp_call",
                "server_label": tool.label,
                "name": tool.tool.name,
                "arguments": arguments,
                "approval_request_id": asked.id,
                "status": "completed" if error is None else "failed",
                "output": output,
                "error": error,
            }
        )
    return found
