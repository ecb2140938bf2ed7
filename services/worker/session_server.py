"""The worker's end of a session: one bidirectional stream a router replica.

Commands are handled in order on the event loop; events leave through one queue. The stream's end, for whatever
reason, is reported once to the worker, which then drops the router's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from services.worker.session import Session
from services.worker.worker import Worker
from shared import failpoints
from shared.errors import InvalidRequest, ModelMismatch, TandemError
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class SessionServer(Generic[CommandT, EventT]):
    """Serves the `Session` method of a worker's gRPC service."""

    def __init__(self, worker: Worker[CommandT, EventT]) -> None:
        self._worker = worker
        self._ids = itertools.count(1)

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Runs one stream to its end."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        try:
            hello = self._check_hello(first)
        except TandemError as error:
            await abort(context, error)
        session: Session[EventT] = Session(next(self._ids), hello.router_name)
        logger.info("router %s connected (session %d)", session.router_name, session.session_id)
        session.send(self._worker.welcome_event(self._worker.welcome()))
        self._worker.on_open(session)
        reader = asyncio.create_task(self._read(session, context))
        writer = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.closed = True
            self._worker.on_closed(session)
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, grpc.aio.UsageError):
                    logger.error("session %d ended by an error", session.session_id, exc_info=result)
            logger.info("router %s gone (session %d)", session.router_name, session.session_id)

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
            raise ModelMismatch(
                f"the cluster serves model {hello.model_fingerprint}, this worker {ours}",
                field="model_fingerprint",
            )
        return hello

    async def _read(self, session: Session[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            command = await context.read()
            if command is grpc.aio.EOF:
                return
            self._worker.on_command(session, command)

    async def _write(self, session: Session[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            event = await session.next_event()
            if failpoints.armed and await failpoints.strike_async(failpoints.SESSION_SEND):
                continue
            await context.write(event)
