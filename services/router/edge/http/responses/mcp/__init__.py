"""Tools of remote MCP servers, which an operator has allowed by their origins."""
