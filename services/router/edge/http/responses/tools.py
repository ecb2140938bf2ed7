"""What a response does with MCP servers before its model is asked: their tools are listed, and approved calls made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.edge.http.responses.inner import approval_request
from services.router.edge.http.responses.mcp.servers import Outcome, Server, ToolBox, known_tools
from services.router.edge.http.responses.schemas import InputItem, ResponseRequest
from services.router.edge.http.responses.shelf import Item, Shelf
from shared.errors import InvalidRequest, brief


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the input approves and that no earlier turn has made."""

    server: Server
    name: str
    arguments: str
    asked_id: str  # of the mcp_approval_request

    @property
    def key(self) -> str:
        """Names the call. A client may give any id, so all that the call is made of is in it."""
        parts = json.dumps([self.asked_id, self.server.url, self.name, self.arguments])
        return hashlib.sha256(parts.encode()).hexdigest()

    def item(self, outcome: Outcome) -> Item:
        """The `mcp_call` item, without its id."""
        output, error = outcome
        return {
            "type": "mcp_call",
            "server_label": self.server.label,
            "name": self.name,
            "arguments": self.arguments,
            "approval_request_id": self.asked_id,
            "status": "completed" if error is None else "failed",
            "output": output,
            "error": error,
        }

    async def made(self, shelf: Shelf, tenant: str, *, is_kept: bool) -> Item:
        """Makes the call, unless an earlier request has: then it is what came of that. `is_kept`: the outcome may be
        kept. Raises StoreUnavailable, and has not made it then."""
        if not shelf.keeps:
            return self.item(await self.server.call(self.name, self.arguments))
        outcome = await shelf.claim_call(tenant, self.key)
        if outcome is None:
            outcome = await self.server.call(self.name, self.arguments)
            if is_kept:
                await shelf.keep_call(tenant, self.key, outcome)
        return self.item(outcome)


async def list_tools(box: ToolBox, request: ResponseRequest, earlier: Sequence[InputItem]) -> None:
    """Lists the tools that no earlier turn has listed. Raises ToolServerFailed where they cannot be listed, and
    InvalidRequest."""
    known = {
        item.server_label: known_tools(item.model_dump())
        for item in [*earlier, *request.items]
        if item.type == "mcp_list_tools" and item.server_label is not None
    }
    names = frozenset(tool.name for tool in request.tools or () if tool.type == "function" and tool.name)
    await box.list_tools(known, names)


def approved_calls(
    box: ToolBox, request: ResponseRequest, earlier: Sequence[InputItem], max_calls: int
) -> list[ApprovedCall]:
    """The calls that the input approves, each once. Raises InvalidRequest (`input`)."""
    items = [*earlier, *request.items]
    made = {item.approval_request_id for item in items if item.type == "mcp_call"}
    found: list[ApprovedCall] = []
    for place, item in enumerate(request.items):
        if item.type != "mcp_approval_response" or not item.approve or item.approval_request_id in made:
            continue
        made.add(item.approval_request_id)
        asked = approval_request(item, items, f"input[{place}]", "input")
        tool = box.tools.get(asked.name or "")
        if tool is None or tool.label != asked.server_label:
            raise InvalidRequest(
                f"input[{place}] approves a call of {brief(str(asked.name), 80)!r}, which tools does not have",
                field="input",
            )
        call = ApprovedCall(box.servers[tool.label], tool.tool.name, asked.arguments or "{}", str(asked.id))
        found.append(call)
    if len(found) > max_calls:
        raise InvalidRequest(
            f"input approves {len(found)} calls, at most {max_calls} are made", field="input", limit=max_calls
        )
    return found
