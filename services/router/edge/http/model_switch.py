"""Several models over HTTP: each has an application of its own; the body says by its `model` which one serves it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.edge.tenants.auth import CALLER, ApiKeys, credentials
from shared.errors import Unauthenticated

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|"|[{}\[\]:]', re.DOTALL)
_KEY = b'"model"'
_MOST_TOKENS = 1 << 19
"""More than a body within the limits has, for contexts of up to 400,000 tokens; the first model's application refuses
it."""
_TOKENS_AT_ONCE = 1024
OF_NO_MODEL = ("/v1/files", "/v1/batches", "/v1/conversations")
"""Paths whose bodies name no model; the first one's application has what all share."""


BY_QUERY = ("/is_sleeping",)
"""Paths without a body whose query names the model."""


class ModelSwitch:
    """An ASGI application. A body is read no further than its model's name, and the bytes read so far are forwarded
    with it; the chosen application does authentication, limits and errors."""

    def __init__(self, app_of: Callable[[str], ASGIApp], keys: ApiKeys, max_body_bytes: int) -> None:
        """`app_of(name)`: the application of the model of that name; of the first one for no name or an unknown one."""
        self._app_of = app_of
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request on."""
        is_post = scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].startswith(OF_NO_MODEL)
        if not is_post or not (CALLER in scope or self._may_read(Headers(scope=scope))):
            await self._app_of(_queried(scope))(scope, receive, send)
            return
        body = _Body(receive, self._max_body_bytes)
        await self._app_of(await body.model())(scope, body.receive, send)

    def _may_read(self, headers: Headers) -> bool:
        """Whether the body may be read: not without a valid API key, nor beyond the size limit."""
        try:
            self._keys.check(credentials(headers))
        except Unauthenticated:
            return False
        length = headers.get("content-length", "")
        return not (length.isdecimal() and int(length) > self._max_body_bytes)


def _queried(scope: Scope) -> str:
    """The model that a request without a body is for; empty where that is none."""
    is_for_one = scope["type"] == "http" and scope["path"] in BY_QUERY
    return QueryParams(scope["query_string"]).get("model", "") if is_for_one else ""


class _Body:
    """A request's body that was begun to be read."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._read: deque[Message] = deque()

    async def receive(self) -> Message:
        """ASGI's `receive`: first what was read already."""
        return self._read.popleft() if self._read else await self._receive()

    async def model(self) -> str:
        """The name in the body; empty where it has none within the limit, or is no JSON object."""
        content = bytearray()
        next_look = 1
        while True:
            message = await self._receive()
            self._read.append(message)
            content += message.get("body", b"")
            is_last = message["type"] != "http.request" or not message.get("more_body", False)
            if is_last or len(content) >= next_look:
                name = await model_in(bytes(content))
                if name is not None or is_last or len(content) > self._limit:
                    return name or ""
                next_look = 2 * len(content)


async def model_in(content: bytes) -> str | None:
    """The string member `model` of the JSON object that `content` is or begins; empty for a member of another type,
    None where it is not there yet. Looks no further than that member and _MOST_TOKENS, in short turns, and parses
    nothing else."""
    depth = 0
    value_at = 0  # where the member's value begins, once it is found
    last = b""
    for number, match in enumerate(_TOKEN.finditer(content)):
        if number == _MOST_TOKENS:
            return ""
        if number % _TOKENS_AT_ONCE == _TOKENS_AT_ONCE - 1:
            await asyncio.sleep(0)
        token = match.group()
        if token == b'"':
            return None  # a string that is cut off
        if value_at:
            return "" if content[value_at : match.start()].strip() else _text(token)
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
        elif token == b":" and depth == 1 and last == _KEY:
            value_at = match.end()
        last = token
    return None


def _text(token: bytes) -> str:
    """A JSON string's text; empty for other tokens and for what is none."""
    try:
        value = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
