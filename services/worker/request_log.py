"""The client's ids of a request on a worker, as the router's records have them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.logs import RequestLog, request_log


def attempt_log(logger: logging.Logger, wire_id: str, trace: Mapping[str, str]) -> RequestLog:
    """`wire_id` is a command's request id: the client's request id, "#", the number of the router's call, ".", and that
    of its attempt, which is what the log shows."""
    request_id, _, numbers = wire_id.rpartition("#")
    attempt = numbers.partition(".")[2]
    return request_log(logger, request_id, trace, attempt) if request_id else request_log(logger, wire_id, trace)


def is_of(taken: types_pb2.TakeOver, wire_id: str, tenant: str) -> bool:
    """Whether a command's request is the one that a client goes on with elsewhere."""
    return wire_id.rpartition("#")[0] == taken.request_id and tenant == taken.tenant
