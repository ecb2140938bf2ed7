"""What a failed call means to a client: the cluster's own error, or a router that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, TandemError, Unauthenticated, WorkerLost
from shared.rpc.errors import ERROR_TRAILER, from_proto
from shared.rpc.pb.tandem.v1 import types_pb2


class RouterLost(WorkerLost):
    """The connection to a router broke, or there was none."""

    code = "router_lost"


_REFUSED = "Connection refused"
"""Part of gRPC's message about a closed port."""


def no_router(targets: Sequence[str], last: RouterLost) -> RouterLost:
    """No router has ever answered: more likely a wrong address than a fault. `last`: what the last call ended with."""
    if _REFUSED in str(last):
        return RouterLost(f"nothing listens at {', '.join(targets)}: start a cluster with `tandem serve`")
    return RouterLost(f"{last}; is it a router's gRPC address, and do both sides speak TLS, or none?")


def typed(error: grpc.RpcError, target: str, *, answered: bool) -> TandemError:
    """The error of a call to `target`; `answered`: some of the answer had come on it.

    What a router says itself is in the trailer. Without one the call ended on its way: RouterLost, unless the status
    names a limit of gRPC's own.
    """
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return from_proto(types_pb2.Error.FromString(value))
    details = error.details()
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{target} did not answer in time")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(f"{target}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequest(f"{target}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Unauthenticated(f"{target}: {details}")
    if answered:
        return RouterLost(f"the connection to {target} broke in the middle of the answer")
    return RouterLost(f"{target} does not answer: {details}")
