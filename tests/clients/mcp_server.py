"""A server of tools by the protocol's own package, for `checks.py`: python mcp_server.py PORT."""

from __future__ import annotations

import sys
from typing import Literal

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("things")


@server.tool()
def describe(kind: Literal["boat", "tower"], large: bool) -> str:
    """Describes a thing."""
    return f"The {kind} is {'large' if large else 'small'}."


if __name__ == "__main__":
    uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
