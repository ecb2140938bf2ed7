"""A client of the Model Context Protocol's streamable HTTP: lists a server's tools and calls them.

Of the protocol (modelcontextprotocol.io, 2025-06-18) only what that takes: JSON-RPC by POST, answered by one JSON body
or by server-sent events. The server's own requests and notifications are not answered. Everything is bounded: the time
of a call, the bytes of an answer, the number of tools. No redirect is followed and no proxy asked, so only the origin
in the URL is spoken to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from shared.errors import InvalidRequest, brief

PROTOCOL_VERSION = "2025-06-18"
MAX_TOOLS = 128
MAX_PAGES = 16
_READ_BYTES = 1 << 16


class McpError(Exception):
    """A server did not do what it was asked for, and why."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool of a server."""

    name: str
    description: str
    input_schema: dict[str, Any]
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of each message to a server."""

    timeout_s: float
    max_bytes: int  # of an answer


class McpClient:
    """One session with one server, as an asynchronous context manager. All calls raise McpError."""

    def __init__(self, url: str, headers: Mapping[str, str], limits: CallLimits) -> None:
        """`headers`: the client's own, which go with each message."""
        self._url = url
        self._headers = dict(headers)
        self._limits = limits
        self._number = 0
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # none of its own: each message has the limits' time
        )
        try:
            found = await self._ask(
                "initialize",
                {
                    "protocolVersion": PROTOCOL_VERSION,
                    "capabilities": {},
                    "clientInfo": {"name": "tandem", "version": "1"},
                },
            )
            self._headers["MCP-Protocol-Version"] = str(found.get("protocolVersion", PROTOCOL_VERSION))[:32]
            await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"}, None)
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if "Mcp-Session-Id" in self._headers:
                async with (
                    asyncio.timeout(self._limits.timeout_s),
                    self._http.delete(self._url, headers=self._headers, allow_redirects=False),
                ):
                    pass  # a server need not take it
        except (TimeoutError, aiohttp.ClientError):
            pass
        finally:
            await self._http.close()

    async def tools(self) -> list[McpTool]:
        """All tools of the server, at most MAX_TOOLS."""
        found: list[McpTool] = []
        cursor: str | None = None
        num_bytes = 0
        for _ in range(MAX_PAGES):
            page = await self._ask("tools/list", {} if cursor is None else {"cursor": cursor})
            listed = page.get("tools")
            if not isinstance(listed, list):
                raise McpError("its tools/list has no tools")
            num_bytes += len(json.dumps(listed))
            if num_bytes > self._limits.max_bytes:
                raise McpError(f"its tools/list is longer than {self._limits.max_bytes} bytes")
            found += map(_tool, listed)
            if len(found) > MAX_TOOLS:
                raise McpError(f"it has more than {MAX_TOOLS} tools")
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                return found
        raise McpError(f"its tools/list has more than {MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text that the tool returned. Raises McpError also where the tool says that it failed."""
        found = await self._ask("tools/call", {"name": name, "arguments": arguments})
        parts = found.get("content")
        texts = [_part(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if not texts and "structuredContent" in found:
            texts = [json.dumps(found["structuredContent"])]
        text = "\n".join(texts)
        if found.get("isError"):
            raise McpError(text or "the tool failed")
        return text

    async def _ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        answer = await self._post(message, self._number)
        error = answer.get("error")
        if error is not None:
            said = error.get("message") if isinstance(error, dict) else error
            raise McpError(f"{method}: {brief(str(said), 500)}")
        result = answer.get("result")
        if not isinstance(result, dict):
            raise McpError(f"{method}: it answered without a result")
        return result

    async def _post(self, message: Mapping[str, Any], number: int | None) -> dict[str, Any]:
        """The message of that number which answers; {} where none is wanted."""
        headers = {**self._headers, "Accept": "application/json, text/event-stream"}
        try:
            async with (
                asyncio.timeout(self._limits.timeout_s),
                self._http.post(self._url, json=message, headers=headers, allow_redirects=False) as response,
            ):
                if not 200 <= response.status < 300:
                    raise McpError(f"it answered with HTTP status {response.status}")
                session = response.headers.get("Mcp-Session-Id")
                if session:
                    self._headers["Mcp-Session-Id"] = session
                if number is None:
                    return {}
                async for text in self._messages(response):
                    found = _parsed(text)
                    if found.get("id") == number and "method" not in found:
                        return found
                raise McpError("it ended its answer without a result")
        except TimeoutError:
            raise McpError(f"it did not answer within {self._limits.timeout_s:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise McpError(f"it cannot be reached: {brief(str(error), 300)}") from error

    async def _messages(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The JSON texts of an answer, as they come."""
        is_stream = response.content_type == "text/event-stream"
        held, num_bytes = bytearray(), 0
        data: list[bytes] = []
        async for chunk in response.content.iter_chunked(_READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._limits.max_bytes:
                raise McpError(f"its answer is longer than {self._limits.max_bytes} bytes")
            held += chunk
            while is_stream and (end := held.find(b"\n")) >= 0:
                line = bytes(held[:end]).rstrip(b"\r")
                del held[: end + 1]
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                elif not line and data:
                    yield b"\n".join(data)
                    data = []
        if not is_stream:
            yield bytes(held)
        elif data:
            yield b"\n".join(data)


def _parsed(text: bytes) -> dict[str, Any]:
    """Halves of surrogate pairs, which are no text, become question marks."""
    try:
        said = text.decode("utf-8-sig", "replace")
        found = json.loads(said)
        if "\\u" in said:
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise McpError("its answer is no JSON") from None
    return found if isinstance(found, dict) else {}


def _tool(item: Any) -> McpTool:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise McpError("one of its tools has no name")
    schema, hints = item.get("inputSchema"), item.get("annotations")
    return McpTool(
        item["name"],
        str(item.get("description") or ""),
        schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
        isinstance(hints, dict) and hints.get("readOnlyHint") is True,
    )


def _part(part: Mapping[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    return json.dumps({"type": part.get("type"), "omitted": "not text"})


def origin_of(url: str, place: str, field: str) -> str:
    """`https://host:port` of a URL, with the scheme's port where it names none. Raises InvalidRequest (`field`), which
    says that it stands at `place`."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}[parts.scheme]
    except (ValueError, KeyError):
        raise InvalidRequest(f"{place} {brief(url, 80)!r} is no http or https URL", field=field) from None
    if not parts.hostname or parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidRequest(
            f"{place} {brief(url, 80)!r} must be a URL with a host, and without a user or fragment", field=field
        )
    return f"{parts.scheme}://{parts.hostname.lower()}:{port}"
