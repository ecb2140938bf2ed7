"""A router's sessions with one worker, one after the other: greeting, what both sides must have alike, back-off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from services.router.workers.liveness import LivenessLimits
from services.router.workers.worker_stream import SessionCall, WorkerStream
from shared.errors import TandemError
from shared.rpc.connection import Connection
from shared.rpc.errors import from_rpc_error
from shared.rpc.fleet_identity import fleet_metadata
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.protocol import PROTOCOL_VERSION, SESSION_METHOD, other_protocol, other_sampler
from shared.seeds import SAMPLER_VERSION

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
HELLO_TIMEOUT_S = 10.0
"""For the answer to a hello."""
REFUSED_WITHIN_S = 1.0
"""A worker that knows the method waits for longer than this for a hello."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Greeting:
    """What a router says of itself to every worker when a session begins."""

    router_name: str
    limits: LivenessLimits = field(default_factory=LivenessLimits)
    router_incarnation: int = 0
    tpot_target_s: float = 0.0
    """Target of time per token by which workers bound their steps, seconds; 0 = none."""

    def hello(self, session: int) -> bytes:
        """The first command of the session of that number with a worker, which is its epoch."""
        hello = types_pb2.Hello(
            router_name=self.router_name,
            protocol_version=PROTOCOL_VERSION,
            sampler_version=SAMPLER_VERSION,
            router_incarnation=self.router_incarnation,
            session=session,
            heartbeat_ms=round(self.limits.interval_s * 1e3),
            give_up_ms=round(self.limits.give_up_after_s * 1e3),
            tpot_target_s=self.tpot_target_s,
        )
        return worker_pb2.Commands(commands=[worker_pb2.Command(hello=hello)]).SerializeToString()


class WorkerSessions:
    """Opens a session, and another one when it has ended, until the worker is no longer wanted."""

    def __init__(
        self,
        worker_name: str,
        address: str,
        greeting: Greeting,
        welcomed: Callable[[types_pb2.Welcome], WorkerStream],
        ended: Callable[[str, bool], bool],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
    ) -> None:
        """`welcomed` takes the worker's answer and returns the session's stream; it raises TandemError for a worker
        that does not fit. `ended` takes why a session ended and whether its connection broke; it returns whether the
        worker had been well. `token`: `FleetKey.token()`."""
        self._name = worker_name
        self._greeting = greeting
        self._num_sessions = 0
        self._welcomed = welcomed
        self._ended = ended
        self._connection = Connection(address, credentials)
        self._metadata = fleet_metadata(token)

    async def run(self, is_over: asyncio.Event) -> None:
        """Returns when a session ends while `is_over` is set."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            reason, broke = await outcome_of(self._session(), self._name)
            if self._ended(reason, broke):
                backoff_s = FIRST_BACKOFF_S
            if is_over.is_set():
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def _session(self) -> None:
        # Commands are serialized where they are made, and events read where they are taken.
        channel = self._connection.channel()
        opened: Any = channel.stream_stream(SESSION_METHOD)
        begin: Callable[[], SessionCall] = partial(opened, metadata=self._metadata)
        call = begin()
        try:
            self._num_sessions += 1
            welcome = await greet(self._name, call, self._greeting.hello(self._num_sessions), begin)
            if welcome is None:
                return
            if welcome.protocol_version != PROTOCOL_VERSION:
                raise other_protocol(f"worker {self._name}", welcome.protocol_version, "this router")
            if welcome.sampler_version != SAMPLER_VERSION:
                raise other_sampler(f"worker {self._name}", welcome.sampler_version, "this router")
            await self._welcomed(welcome).run(call)
        except grpc.aio.AioRpcError as error:
            # Where a command was on its way as the connection broke, gRPC may say that the call failed internally.
            is_up = channel.get_state() is grpc.ChannelConnectivity.READY
            if is_up or error.code() is not grpc.StatusCode.INTERNAL:
                raise
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, error.initial_metadata(), error.trailing_metadata(), "the connection broke"
            ) from error
        finally:
            call.cancel()


async def greet(
    worker_name: str, call: SessionCall, hello: bytes, begin: Callable[[], SessionCall]
) -> types_pb2.Welcome | None:
    """Sends a serialized hello on a new call; returns the worker's answer, None where it ended the session.

    A worker that does not know the session's method refuses it at once. Where that crosses the hello, gRPC says of the
    call that it failed internally, and no more: then another call of `begin`, which sends nothing, gets the reason.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await call.write(hello)
            first = await anext(aiter(call), None)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and await _is_unknown(begin()):
            raise other_protocol(f"worker {worker_name}", 1, "this router") from error
        raise
    return None if first is None else worker_pb2.Events.FromString(first).events[0].welcome


async def _is_unknown(call: SessionCall) -> bool:
    """Whether the worker refuses a call because it does not know the method."""
    try:
        async with asyncio.timeout(REFUSED_WITHIN_S):
            return await call.code() is grpc.StatusCode.UNIMPLEMENTED
    except TimeoutError:
        return False
    finally:
        call.cancel()


async def outcome_of(session: Coroutine[Any, Any, None], worker_name: str) -> tuple[str, bool]:
    """Runs a session to its end. Returns why it ended, and whether its connection broke, as it does when the worker's
    process ends. Raises nothing for an error of the session, not even for a bug in handling what the worker sent, so
    that the caller can open the next session."""
    # A task of its own: gRPC ends the reader of a stream that the other side cancelled with CancelledError.
    task = asyncio.create_task(session)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # takes its error, which asyncio would log
        raise
    if task.cancelled():
        return "the worker cancelled the session", False
    error = task.exception()
    match error:
        case None:
            return "the worker closed the session", False
        case grpc.aio.AioRpcError() if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return str(other_protocol(f"worker {worker_name}", 1, "this router")), False
        case grpc.aio.AioRpcError():
            broke = error.code() is grpc.StatusCode.UNAVAILABLE
            return str(from_rpc_error(error, f"worker {worker_name}")), broke
        case TandemError() | TimeoutError() | asyncio.InvalidStateError() | grpc.aio.UsageError():
            return str(error) or type(error).__name__, False
        case _:
            logger.error("session with worker %s", worker_name, exc_info=error)
            return f"{type(error).__name__}: {error}", False
