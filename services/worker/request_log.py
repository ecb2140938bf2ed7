"""Log records of one request on a worker, under the ids that the router's records have."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shared.telemetry.logs import RequestLog, request_log


def attempt_log(logger: logging.Logger, wire_id: str, trace: Mapping[str, str]) -> RequestLog:
    """`wire_id` is a command's request id: the client's request id, "#", and the number of the router's attempt."""
    request_id, _, attempt = wire_id.rpartition("#")
    return request_log(logger, request_id, trace, attempt) if request_id else request_log(logger, wire_id, trace)
