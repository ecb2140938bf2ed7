"""The client's ids of a request on a worker, as the router's records have them."""

from __future__ import annotations

import logging

from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.logs import RequestLog, request_log
from shared.telemetry.trace_context import trace_id_of


def attempt_log(logger: logging.Logger, wire_id: str, traceparent: str) -> RequestLog:
    """`wire_id` is a command's request id: the client's request id, "#", the number of the router's call, ".", and that
    of its attempt, which is what the log shows. `traceparent`: the command's, which may be empty."""
    trace_id = trace_id_of(traceparent)
    request_id, _, numbers = wire_id.rpartition("#")
    attempt = numbers.partition(".")[2]
    return request_log(logger, request_id, trace_id, attempt) if request_id else request_log(logger, wire_id, trace_id)


def is_of(taken: types_pb2.TakeOver, wire_id: str, tenant: str) -> bool:
    """Whether a command belongs to the request that a client continues on another router."""
    return wire_id.rpartition("#")[0] == taken.request_id and tenant == taken.tenant
