"""The worker's end of a session: one bidirectional stream a router replica.

Commands are handled in order on the event loop; events leave through one queue. The session's end is reported once to
the worker, which then drops the router's requests: when the stream ends, when a newer session of the same router
replaces it, when the router is silent for longer than its Hello allows, or does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from services.worker.engine_progress import EngineProgress
from services.worker.session import Session
from services.worker.worker import Worker
from shared import failpoints
from shared.errors import DeadlineExceeded, InvalidRequest, ModelMismatch, TandemError, Unauthenticated
from shared.fingerprints import difference
from shared.rpc.errors import abort
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""For a stream's first command."""
LAST_WRITE_TIMEOUT_S = 2.0
"""For the message that is on its way out when a session ends."""
STREAM_OVER = (grpc.aio.UsageError, grpc.aio.InternalError)
"""What gRPC raises for a read or write on a stream that the router has left."""

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class SessionServer(Generic[CommandT, EventT]):
    """Serves the `Session` method of a worker's gRPC service."""

    def __init__(self, worker: Worker[CommandT, EventT], guard: FleetGuard | None = None) -> None:
        """`guard` admits who may drain the worker; None: all."""
        self._worker = worker
        self._guard = guard or FleetGuard()
        self._ids = itertools.count(1)
        self._newest: dict[str, Session[EventT]] = {}  # by router name, ended ones too: their epochs are refused
        self._progress: EngineProgress | None = None

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Runs one stream to its end."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            await abort(context, DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:g} s", limit=HELLO_TIMEOUT_S))
        if first is grpc.aio.EOF:
            return
        try:
            hello = self._check_hello(first)
            session: Session[EventT] = Session(next(self._ids), hello.router_name, hello)
            self._replace(session)
        except TandemError as error:
            await abort(context, error)
        logger.info("router %s connected (session %d)", session.router_name, session.session_id)
        welcome = self._worker.welcome()
        welcome.heartbeats = hello.heartbeat_ms > 0
        session.send(self._worker.welcome_event(welcome))
        self._worker.on_open(session)
        reader = asyncio.create_task(self._read(session, context))
        writer = asyncio.create_task(self._write(session, context))
        ends = [reader, writer, asyncio.create_task(self._beat(session))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close(session)
            try:
                # It ends by itself: gRPC never ends a stream of which the first message was cut off on its way out.
                await asyncio.wait({writer}, timeout=LAST_WRITE_TIMEOUT_S)
            finally:  # a worker that stops cancels this wait
                for task in ends:
                    task.cancel()
                results = await asyncio.gather(*ends, return_exceptions=True)
                for result in results:
                    if isinstance(result, Exception) and not isinstance(result, (*STREAM_OVER, Unauthenticated)):
                        logger.error("session %d ended by an error", session.session_id, exc_info=result)
            reason = f": {session.end_reason}" if session.end_reason else ""
            logger.info("router %s gone (session %d)%s", session.router_name, session.session_id, reason)
        for result in results:
            if isinstance(result, Unauthenticated):
                await abort(context, result)

    def _replace(self, session: Session[EventT]) -> None:
        """The router's older session is over, whether or not its stream is known to be: its requests are dropped
        before the first command of the new one. Raises InvalidRequest for an epoch that is itself older."""
        hello, older = session.hello, self._newest.get(session.router_name)
        if older is not None and hello.router_incarnation == older.hello.router_incarnation != 0:
            if hello.session <= older.hello.session:
                raise InvalidRequest(
                    f"session {hello.session} of router {session.router_name} is over, session {older.hello.session} "
                    "came after it",
                    field="session",
                    limit=older.hello.session,
                )
            older.end("replaced by a newer session")
            self._close(older)
        self._newest[session.router_name] = session

    def _close(self, session: Session[EventT]) -> None:
        if not session.closed:
            session.close()
            self._worker.on_closed(session)

    def _check_hello(self, command: Any) -> types_pb2.Hello:
        hello = self._worker.hello_of(command)
        if hello is None:
            raise InvalidRequest("the first command of a session must be hello", field="hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ModelMismatch(
                f"router {hello.router_name} speaks protocol {hello.protocol_version}, this worker {PROTOCOL_VERSION}",
                field="protocol_version",
                limit=PROTOCOL_VERSION,
            )
        ours = self._worker.welcome().model_fingerprint
        if hello.model_fingerprint and hello.model_fingerprint != ours:
            raise ModelMismatch(f"this worker {difference(ours, hello.model_fingerprint)}", field="model_fingerprint")
        return hello

    async def _read(self, session: Session[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises Unauthenticated for an order that its router may not give: whoever writes has to end first."""
        while True:
            command = await context.read()
            if command is grpc.aio.EOF or session.closed:
                return
            kind = command.WhichOneof("command")
            if kind == "heartbeat":
                session.silent_s = 0.0
                if command.heartbeat.kept_traces and self._worker.spans is not None:
                    self._worker.spans.release(command.heartbeat.kept_traces)
                continue
            if kind in ("drain", "undrain"):
                try:
                    self._guard.check(context)
                except Unauthenticated:
                    logger.warning("router %s may not %s this worker", session.router_name, kind)
                    raise
            self._worker.take(session, command)

    async def _write(self, session: Session[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (event := await session.next_event()) is not None:
            if failpoints.armed and await failpoints.strike_async(failpoints.SESSION_SEND):
                continue
            await context.write(event)

    async def _beat(self, session: Session[EventT]) -> None:
        """Sends heartbeats as the router asked, and returns when the session is to be ended from this side."""
        interval_s = session.hello.heartbeat_ms / 1e3
        while interval_s and not session.over.is_set():
            session.send(self._worker.heartbeat_event(self._look()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.over.wait(), interval_s)
            session.silent_s += interval_s
            if session.hello.give_up_ms and session.silent_s * 1e3 > session.hello.give_up_ms:
                session.end(f"the router was silent for {session.silent_s:.1f} s")
        await session.over.wait()

    def _look(self) -> types_pb2.Heartbeat:
        if self._progress is None:
            self._progress = EngineProgress(self._worker.host.engine.steps)
        return self._progress.heartbeat()
