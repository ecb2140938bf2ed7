"""Errors in OpenAI's shape, as whole responses and as events of a stream."""

from __future__ import annotations

import json
import logging
import math

from shared.errors import Internal, TandemError, brief
from shared.telemetry.logs import request_log

logger = logging.getLogger(__name__)


def as_tandem_error(error: Exception, request_id: str) -> TandemError:
    """The error itself, or Internal for a bug of ours, which is logged and not shown in detail."""
    if isinstance(error, TandemError):
        return error
    request_log(logger, request_id, {}).error("request %s failed", request_id, exc_info=error)
    return Internal(f"internal error ({type(error).__name__}) while serving request {request_id}")


def error_json(error: TandemError, code: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`; `code` replaces the class's own."""
    body = {
        "message": brief(error.message, max_len=1000),
        "type": error.error_type,
        "param": error.field,
        "code": code or error.code,
    }
    return json.dumps({"error": body}).encode()


def error_headers(error: TandemError) -> list[tuple[bytes, bytes]]:
    """Headers that go with the status: when to come back, how to authenticate."""
    retry_after_s = error.details.get("retry_after_s")
    if isinstance(retry_after_s, float):
        return [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))]
    if error.http_status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
