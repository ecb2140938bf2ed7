"""Calls of the HTTP API from within the router: the same application, without a socket and without a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from services.router.edge.tenants.auth import CALLER, Caller


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller, headers: Mapping[str, str]) -> Answer:
    """Posts JSON on the account of `caller`, whose rights are taken as given. A cancelled call frees all that it
    holds."""
    sent: list[Message] = []
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": None,
        "server": None,
        CALLER: caller,
    }
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # the caller never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the application answers a cancelled request with an error and returns
    start = next(message for message in sent if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    headers_of = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers_of, content)
