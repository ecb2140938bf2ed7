"""Every answer carries a request id: the client's, or a drawn one."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.edge.access import STATUS
from services.router.edge.input_processor import checked_request_id
from shared.errors import InvalidRequest

_NAME = b"x-request-id"


class RequestIds:
    """Wraps an application; answers that have the header already keep theirs. Notes their status in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                headers = message.setdefault("headers", [])
                if not any(name.lower() == _NAME for name, _ in headers):
                    message["headers"] = [*headers, (_NAME, _request_id(scope).encode())]
            await send(message)

        await self._app(scope, receive, marked)


def _request_id(scope: Scope) -> str:
    try:
        return checked_request_id(Headers(scope=scope).get("x-request-id", ""))
    except InvalidRequest:
        return checked_request_id("")
