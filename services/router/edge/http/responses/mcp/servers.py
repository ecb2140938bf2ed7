"""Remote MCP servers in a request: which may be asked, which of their tools the model sees, and which calls wait for
the client's approval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.edge.http.responses.mcp.client import CallLimits, McpClient, McpError, McpTool, origin_of
from services.router.edge.http.responses.schemas import Approval, ResponseTool, ToolFilter
from services.router.edge.settings import McpSettings
from shared.errors import ConfigError, InvalidRequest, ToolServerFailed, brief

Outcome = tuple[str | None, str | None]
"""Outcome of a call: its text, or why there is none."""
MAX_SERVERS = 16
"""Most servers of one request."""
_SETTING = "edge.mcp.allowed_servers"
MAX_HEADERS, MAX_HEADER_LEN = 32, 8192
_OWN_HEADERS = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept", "upgrade", "te", "trailer")
)


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server that a request names."""

    label: str
    tool: McpTool
    needs_approval: bool


@dataclass(frozen=True, slots=True)
class Server:
    """One of `tools`, whose type is mcp."""

    label: str
    url: str
    headers: Mapping[str, str]
    wanted: ToolFilter | None  # None: all
    approval: Approval
    limits: CallLimits

    async def tools(self) -> list[McpTool]:
        """The server's tools. Raises ToolServerFailed."""
        try:
            async with McpClient(self.url, self.headers, self.limits) as client:
                return await client.tools()
        except McpError as error:
            raise ToolServerFailed(
                f"the tools of MCP server {self.label!r} cannot be listed: {error}", field="tools"
            ) from None

    async def call(self, name: str, arguments: str) -> Outcome:
        """The tool's text, or why there is none."""
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None, "the arguments are no JSON"
        if not isinstance(given, dict):
            return None, "the arguments are no JSON object"
        try:
            async with McpClient(self.url, self.headers, self.limits) as client:
                return await client.call(name, given), None
        except McpError as error:
            return None, str(error)

    def offers(self, tool: McpTool) -> bool:
        """Whether the request lets the model see this tool."""
        return self.wanted is None or self.wanted.has(tool.name, is_read_only=tool.is_read_only)

    def needs_approval(self, tool: McpTool) -> bool:
        """What is neither named there as always nor as never does."""
        if isinstance(self.approval, str):
            return self.approval != "never"
        never, always = self.approval.get("never"), self.approval.get("always")
        if always is not None and always.has(tool.name, is_read_only=tool.is_read_only):
            return True
        return never is None or not never.has(tool.name, is_read_only=tool.is_read_only)


@dataclass(slots=True)
class ToolBox:
    """The servers of one request, and what is known of their tools."""

    servers: Mapping[str, Server]
    tools: dict[str, ServerTool] = field(default_factory=dict)  # by name
    listings: list[dict[str, Any]] = field(default_factory=list)  # `mcp_list_tools` items that are new

    async def list_tools(self, known: Mapping[str, Sequence[McpTool]], taken: frozenset[str]) -> None:
        """Asks each server whose tools are not known from an earlier turn. `taken`: names of the request's own
        functions. Raises ToolServerFailed, also where the lists of all are longer than one answer may be, and
        InvalidRequest (`tools`) where two tools have one name."""
        num_bytes = 0
        for label, server in self.servers.items():
            found = known.get(label)
            if found is None:
                found = [tool for tool in await server.tools() if server.offers(tool)]
                listing = {"type": "mcp_list_tools", "server_label": label, "tools": [_listed(t) for t in found]}
                num_bytes += len(json.dumps(listing))
                limit = server.limits.max_bytes
                if num_bytes > limit:
                    raise ToolServerFailed(
                        f"the lists of tools up to that of MCP server {label!r} are longer than {limit} bytes",
                        field="tools",
                        limit=limit,
                    )
                self.listings.append(listing)
            for tool in found:
                if not server.offers(tool):
                    continue
                if tool.name in taken or tool.name in self.tools:
                    raise InvalidRequest(
                        f"tools: two of them are called {brief(tool.name, 80)!r}: leave one out by allowed_tools",
                        field="tools",
                    )
                self.tools[tool.name] = ServerTool(label, tool, server.needs_approval(tool))


class Servers:
    """Which servers requests may name: those of the origins in the settings, none by default."""

    def __init__(self, settings: McpSettings) -> None:
        """Raises ConfigError for an origin that is none."""
        try:
            self._origins = frozenset(origin_of(origin, _SETTING, _SETTING) for origin in settings.allowed_servers)
        except InvalidRequest as error:
            raise ConfigError(error.message, field=_SETTING) from None
        self._limits = CallLimits(settings.timeout_s, settings.max_result_bytes)
        self.max_calls = settings.max_calls

    def of(self, tools: Sequence[ResponseTool]) -> ToolBox:
        """The servers that a request names. Raises InvalidRequest (`tools`) for one that is not allowed or not
        complete."""
        found: dict[str, Server] = {}
        for index, tool in enumerate(tools):
            if tool.type == "mcp":
                server = self._server(tool, f"tools[{index}]")
                if server.label in found:
                    raise InvalidRequest(f"tools names server_label {server.label!r} twice", field="tools")
                found[server.label] = server
        if len(found) > MAX_SERVERS:
            raise InvalidRequest(
                f"tools names {len(found)} MCP servers, at most {MAX_SERVERS} are served",
                field="tools",
                limit=MAX_SERVERS,
            )
        return ToolBox(found)

    def _server(self, tool: ResponseTool, place: str) -> Server:
        if not tool.server_label or tool.server_url is None:
            missing = "server_url" if tool.server_label else "server_label"
            raise InvalidRequest(f"{place}.{missing} is missing", field="tools")
        origin = origin_of(tool.server_url, f"{place}.server_url", "tools")
        if origin not in self._origins:
            why = "edge.mcp.allowed_servers has not its origin" if self._origins else "no MCP server is allowed here"
            raise InvalidRequest(f"{place}.server_url {brief(tool.server_url, 120)!r}: {why}", field="tools")
        headers = dict(tool.headers or {})
        if len(headers) > MAX_HEADERS:
            raise InvalidRequest(
                f"{place}.headers has more than {MAX_HEADERS} entries", field="tools", limit=MAX_HEADERS
            )
        for name, value in headers.items():
            is_text = name.isascii() and name.replace("-", "").replace("_", "").isalnum() and _is_header(value)
            if not is_text or name.lower() in _OWN_HEADERS or name.lower().startswith("mcp-"):
                raise InvalidRequest(f"{place}.headers: {brief(name, 40)!r} cannot be sent", field="tools")
        if tool.authorization is not None:
            if not _is_header(tool.authorization):
                raise InvalidRequest(f"{place}.authorization cannot be sent", field="tools")
            headers["Authorization"] = f"Bearer {tool.authorization}"
        approval = tool.require_approval or "always"
        return Server(tool.server_label, tool.server_url, headers, tool.wanted_tools, approval, self._limits)


def _is_header(value: str) -> bool:
    return len(value) <= MAX_HEADER_LEN and value.isascii() and value.isprintable()


def _listed(tool: McpTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": {"readOnlyHint": tool.is_read_only},
    }


def known_tools(listing: Mapping[str, Any]) -> list[McpTool]:
    """The tools of an `mcp_list_tools` item of an earlier turn. Raises InvalidRequest (`input`)."""
    found = []
    for item in listing.get("tools") or ():
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise InvalidRequest("input: an mcp_list_tools item has a tool without a name", field="input")
        schema, hints = item.get("input_schema"), item.get("annotations")
        is_read_only = isinstance(hints, dict) and hints.get("readOnlyHint") is True
        found.append(
            McpTool(
                item["name"],
                str(item.get("description") or ""),
                schema if isinstance(schema, dict) else {},
                is_read_only,
            )
        )
    return found
