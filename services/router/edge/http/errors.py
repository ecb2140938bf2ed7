"""Errors as whole responses and as events of a stream, in OpenAI's shape unless an endpoint has another."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Protocol

from shared.errors import Internal, TandemError, brief
from shared.telemetry.logs import request_log
from shared.telemetry.trace_context import current_trace_id

logger = logging.getLogger(__name__)

MAX_MESSAGE_LEN = 1000


class ErrorShape(Protocol):
    """The shape of an endpoint's errors."""

    def body(self, error: TandemError) -> bytes:
        """A whole response's JSON."""
        ...

    def event(self, error: TandemError) -> bytes:
        """The last event of a stream."""
        ...


class OpenAIErrors:
    """`{"error": {message, type, param, code}}`, as a body and as an event."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        """`names`: fields that the endpoint calls otherwise than the chat request that it becomes."""
        self._names = names or {}

    def body(self, error: TandemError) -> bytes:
        """See `ErrorShape`."""
        return error_json(error, names=self._names)

    def event(self, error: TandemError) -> bytes:
        """See `ErrorShape`."""
        return b"data: " + self.body(error) + b"\n\n"


def as_tandem_error(error: Exception, request_id: str) -> TandemError:
    """The error itself, or Internal for a bug of ours, which is logged and not shown in detail."""
    if isinstance(error, TandemError):
        return error
    request_log(logger, request_id, current_trace_id()).error("request %s failed", request_id, exc_info=error)
    return Internal(f"internal error ({type(error).__name__}) while serving request {request_id}")


def renamed(error: TandemError, names: Mapping[str, str]) -> tuple[str, str | None]:
    """An error's message and field in an endpoint's own words."""
    message, field = brief(error.message, max_len=MAX_MESSAGE_LEN), error.field
    for theirs, ours in names.items():
        if field is not None and (field == theirs or field.startswith((f"{theirs}[", f"{theirs}."))):
            field = ours + field[len(theirs) :]
            message = message.replace(theirs, ours)
            break
    return message, field


def error_json(error: TandemError, code: str | None = None, names: Mapping[str, str] | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`; `code` replaces the class's own."""
    message, field = renamed(error, names or {})
    body = {"message": message, "type": error.error_type, "param": field, "code": code or error.code}
    return json.dumps({"error": body}).encode()


def error_headers(error: TandemError) -> list[tuple[bytes, bytes]]:
    """Headers that go with the status: when to come back, how to authenticate."""
    retry_after_s = error.details.get("retry_after_s")
    if isinstance(retry_after_s, float):
        return [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))]
    if error.http_status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
