"""The worker's end of a session: one bidirectional stream a router replica.

Commands are handled in order on the event loop; events leave through one queue. The stream's end, for whatever
reason, is reported once to the role, which then drops the router's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from shared.errors import InvalidRequest, ModelMismatch, TandemError
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT", contravariant=True)
EventT = TypeVar("EventT")


class Session(Generic[EventT]):
    """One router's stream, as the role sees it."""

    def __init__(self, session_id: int, router_name: str) -> None:
        self.session_id = session_id
        self.router_name = router_name
        self.closed = False
        self._outgoing: asyncio.Queue[EventT] = asyncio.Queue()

    def key(self, request_id: str) -> str:
        """A sequence id that is unique on this worker: two routers may choose the same request id."""
        return f"{self.session_id}/{request_id}"

    def send(self, event: EventT) -> None:
        """Queues an event; a no-op once the stream is gone."""
        if not self.closed:
            self._outgoing.put_nowait(event)

    async def next_event(self) -> EventT:
        """The next event to write."""
        return await self._outgoing.get()


class Role(Protocol[CommandT, EventT]):
    """What prefill and decode do with their sessions. All methods run on the event loop and do not block."""

    def hello_of(self, command: CommandT) -> types_pb2.Hello | None:
        """The Hello inside a command, or None."""
        ...

    def welcome_event(self, welcome: types_pb2.Welcome) -> EventT:
        """Wraps the answer to Hello."""
        ...

    def welcome(self) -> types_pb2.Welcome:
        """This worker's identity and capacity."""
        ...

    def on_open(self, session: Session[EventT]) -> None:
        """A router is connected."""
        ...

    def on_command(self, session: Session[EventT], command: CommandT) -> None:
        """Any command but Hello."""
        ...

    def on_closed(self, session: Session[EventT]) -> None:
        """The router is gone: free everything it holds."""
        ...


class SessionServer(Generic[CommandT, EventT]):
    """Serves the `Session` method of a role's gRPC service."""

    def __init__(self, role: Role[CommandT, EventT]) -> None:
        self._role = role
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
        session.send(self._role.welcome_event(self._role.welcome()))
        self._role.on_open(session)
        reader = asyncio.create_task(self._read(session, context))
        writer = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.closed = True
            self._role.on_closed(session)
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, grpc.aio.UsageError):
                    logger.error("session %d ended by an error", session.session_id, exc_info=result)
            logger.info("router %s gone (session %d)", session.router_name, session.session_id)

    def _check_hello(self, command: Any) -> types_pb2.Hello:
        hello = self._role.hello_of(command)
        if hello is None:
            raise InvalidRequest("the first command of a session must be hello", field="hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ModelMismatch(
                f"router {hello.router_name} speaks protocol {hello.protocol_version}, this worker {PROTOCOL_VERSION}",
                field="protocol_version",
                limit=PROTOCOL_VERSION,
            )
        ours = self._role.welcome().model_fingerprint
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
            self._role.on_command(session, command)

    async def _write(self, session: Session[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await session.next_event())
