"""Errors in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping

from services.router.edge.http.errors import renamed
from shared.errors import TandemError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrors:
    """`{"type": "error", "error": {type, message}}`, as a body and as an event."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: fields that the endpoint calls otherwise than the chat request that it becomes."""
        self._names = names

    def body(self, error: TandemError) -> bytes:
        """See `ErrorShape`."""
        message, field = renamed(error, self._names)
        if field is not None and field not in message:
            message = f"{field}: {message}"
        kind = _TYPES.get(error.http_status, "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()

    def event(self, error: TandemError) -> bytes:
        """See `ErrorShape`."""
        return b"event: error\ndata: " + self.body(error) + b"\n\n"
