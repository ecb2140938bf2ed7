"""Typed errors on the wire: as messages in a session, as status + trailer on a unary or streaming call."""

from __future__ import annotations

import math
from typing import NoReturn

import grpc
import grpc.aio

from shared.errors import DeadlineExceeded, Internal, Overloaded, TandemError, WorkerLost, brief, error_classes
from shared.rpc.pb.tandem.v1 import types_pb2

ERROR_TRAILER = "tandem-error-bin"
"""Trailing metadata key that carries a serialized tandem.v1.Error beside the gRPC status."""


def to_proto(error: BaseException) -> types_pb2.Error:
    """Any exception as a message. What is not a TandemError becomes Internal, and a class of one service's own the
    class of `shared.errors` that it specialises: the other side may not know it, and it must stay retryable there."""
    if not isinstance(error, TandemError):
        error = Internal(f"{type(error).__name__}: {error}")
    details = {key: str(value) for key, value in error.details.items()}
    return types_pb2.Error(kind=_shared_class(error).__name__, message=error.message, details=details)


def _shared_class(error: TandemError) -> type[BaseException]:
    return next(cls for cls in type(error).__mro__ if cls.__module__ == TandemError.__module__)


def from_proto(message: types_pb2.Error) -> TandemError:
    """The exception that `to_proto` was given; an unknown kind becomes Internal."""
    cls = error_classes().get(message.kind, Internal)
    details = dict(message.details)
    retry_after = details.pop("retry_after_s", None)
    if issubclass(cls, Overloaded):
        return cls(message.message, retry_after_s=float(retry_after or 1.0), **details)
    return cls(message.message, retry_after_s=float(retry_after) if retry_after else None, **details)


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:  # type: ignore[type-arg]
    """Ends a call with the error's status code, its message and the typed error as trailer."""
    message = to_proto(error)
    message.message = brief(message.message, max_len=400 if message.message.isascii() else 100)
    for key, value in message.details.items():
        message.details[key] = brief(value, max_len=100)
    cls = error_classes()[message.kind]
    trailers: list[tuple[str, str | bytes]] = [(ERROR_TRAILER, message.SerializeToString())]
    retry_after_s = error.details.get("retry_after_s") if isinstance(error, TandemError) else None
    if isinstance(retry_after_s, float):
        trailers.append(("retry-after", str(math.ceil(retry_after_s))))
    await context.abort(getattr(grpc.StatusCode, cls.grpc_code), message.message, tuple(trailers))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> TandemError:
    """What a failed call to `peer` means to us: the peer's typed error, a deadline, or a lost peer."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return from_proto(types_pb2.Error.FromString(value))
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer in time")
    return WorkerLost(f"{peer}: {error.code().name}: {error.details()}")
