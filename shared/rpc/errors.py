"""Typed errors on the wire: as messages in a session, as status + trailer on a unary or streaming call."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from shared.errors import (
    DeadlineExceeded,
    Internal,
    Overloaded,
    StoreUnavailable,
    TandemError,
    WorkerLost,
    brief_bytes,
    error_classes,
)
from shared.rpc.pb.tandem.v1 import types_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATUS_TRAILER = "grpc-status-details-bin"
"""Trailing metadata key of gRPC's rich error model: a serialized google.rpc.Status."""
STATUS_DOMAIN = "tandem"
ERROR_TRAILER = "tandem-error-bin"
"""Trailing metadata key that carries a serialized tandem.v1.Error beside the gRPC status."""

STREAM_OVER = grpc.aio.BaseError
"""What gRPC raises for a read or write on a stream that the client has left, or whose server stops."""

MAX_TEXT_BYTES = 400
"""Longest message of an error. A byte of it takes up to 3 + 4/3 bytes on the wire: percent-encoded in the status, and
in base64 in the trailer."""
MAX_DETAIL_BYTES = 100
"""Most bytes of one detail's value."""
MAX_DETAILS_BYTES = 500
"""Most bytes of all details, keys included. The trailers stay below 4 KiB, half of what gRPC's clients accept by
default."""


def to_proto(error: BaseException) -> types_pb2.Error:
    """Any exception as a message. What is not a TandemError becomes Internal, and a class of one service's own the
    class of `shared.errors` that it specialises: the other side may not know it, and it must stay retryable there."""
    if not isinstance(error, TandemError):
        error = Internal(f"{type(error).__name__}: {error}")
    details = {key: _expressible(str(value)) for key, value in error.details.items()}
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == TandemError.__module__)
    return types_pb2.Error(kind=kind, message=_expressible(error.message), details=details)


def _expressible(text: str) -> str:
    """Half a surrogate pair, as JSON can carry it, becomes a question mark: a message cannot hold it."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def from_proto(message: types_pb2.Error) -> TandemError:
    """The exception that `to_proto` was given; an unknown kind becomes Internal."""
    cls = error_classes().get(message.kind, Internal)
    details = dict(message.details)
    retry_after = details.pop("retry_after_s", None)
    if issubclass(cls, Overloaded):
        return cls(message.message, retry_after_s=float(retry_after or 1.0), **details)
    return cls(message.message, retry_after_s=float(retry_after) if retry_after else None, **details)


def in_trailers(error: BaseException) -> types_pb2.Error:
    """As `to_proto`, but short enough for a call's trailers whatever the error quotes: what does not fit never reaches
    the client, and the status with it. Details that are too many are left out, the longest first."""
    message = to_proto(error)
    message.message = brief_bytes(message.message, MAX_TEXT_BYTES)
    num_bytes = 0
    details = {key: brief_bytes(value, MAX_DETAIL_BYTES) for key, value in message.details.items()}
    message.details.clear()
    for key, value in sorted(details.items(), key=lambda item: len(item[0]) + len(item[1])):
        num_bytes += len(key.encode()) + len(value.encode())
        if num_bytes <= MAX_DETAILS_BYTES:
            message.details[key] = value
    return message


def rich_status(message: types_pb2.Error, cls: type[TandemError], code: int) -> status_pb2.Status:
    """An error that `in_trailers` made, for clients that know gRPC's rich error model alone: ErrorInfo with the class's
    code, BadRequest with the field at fault, RetryInfo with when to come back."""
    status = status_pb2.Status(code=code, message=message.message)
    known = {name: brief_bytes(message.details[name], 40) for name in ("limit", "value") if name in message.details}
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=cls.code.upper(), domain=STATUS_DOMAIN, metadata=known)
    )
    field = message.details.get("field")
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=brief_bytes(field, 40), description=brief_bytes(message.message, 100)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_after_s = message.details.get("retry_after_s")
    if retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(float(retry_after_s) * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def answer(work: Awaitable[T], context: grpc.aio.ServicerContext) -> T:  # type: ignore[type-arg]
    """The result of `work`; ends the call with a typed error if it raised. gRPC's own answer to an exception would be
    its whole text in the status."""
    try:
        return await work
    except TandemError as error:
        await abort(context, error)
    except Exception as error:
        logger.exception("unexpected error in a call")
        await abort(context, error)


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:  # type: ignore[type-arg]
    """Ends a call with the error's status code, its message and the typed error as trailer."""
    message = in_trailers(error)
    cls = error_classes()[message.kind]
    code = getattr(grpc.StatusCode, cls.grpc_code)
    trailers: list[tuple[str, str | bytes]] = [
        (ERROR_TRAILER, message.SerializeToString()),
        (STATUS_TRAILER, rich_status(message, cls, code.value[0]).SerializeToString()),
    ]
    retry_after_s = error.details.get("retry_after_s") if isinstance(error, TandemError) else None
    if isinstance(retry_after_s, float):
        trailers.append(("retry-after", str(math.ceil(retry_after_s))))
    await context.abort(code, message.message, tuple(trailers))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> TandemError:
    """What a failed call to `peer` means to us: the peer's typed error, a deadline, or a lost peer."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return from_proto(types_pb2.Error.FromString(value))
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer in time")
    return WorkerLost(f"{peer}: {error.code().name}: {error.details()}")


def from_store_error(error: grpc.aio.AioRpcError, address: str, peer: str = "") -> TandemError:
    """What a failed call to a KV store or to a holder of blocks means: its typed error, StoreUnavailable where it sent
    none. `peer`: what messages call it, if not by its address."""
    typed = from_rpc_error(error, peer or address)
    if isinstance(typed, WorkerLost | DeadlineExceeded):
        return StoreUnavailable(typed.message, address=address)
    return typed
