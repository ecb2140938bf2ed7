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
import time
from typing import Any, Protocol

import grpc
import grpc.aio

from services.worker.host import EngineHost
from shared import failpoints
from shared.engine.step_counters import StepCounters
from shared.errors import DeadlineExceeded, InvalidRequest, ModelMismatch, TandemError, Unauthenticated
from shared.fingerprints import difference
from shared.rpc.errors import STREAM_OVER, abort
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.protocol import (
    OLD_SESSION_SERVICES,
    PROTOCOL_VERSION,
    SESSION_SERVICE,
    other_protocol,
    other_sampler,
)
from shared.seeds import SAMPLER_VERSION
from shared.telemetry.tracing.span import SpanSink

MAX_EVENTS = 65_536
"""Events that may wait for a router to read them; then its session is ended. A step is one event."""
MAX_GAP_S = 0.5
"""Most that one look adds: a process that was itself stopped for a while does not blame its engine. Seconds."""
LATE_S = 1.0
"""A heartbeat that much late is logged: it says whether a worker that was given up had stood still itself."""
logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 10.0
"""Longest wait for the first command of a session's stream."""
LAST_WRITE_TIMEOUT_S = 2.0
"""For the message that is on its way out when a session ends."""
Context = grpc.aio.ServicerContext[Any, Any]


class Session:
    """Sends events to one router. `SessionServer` opens and closes it."""

    def __init__(self, session_id: int, router_name: str, hello: types_pb2.Hello | None = None) -> None:
        """`hello`: what the router began it with, for its epoch and its heartbeats."""
        self.session_id = session_id
        self.router_name = router_name
        self.hello = hello or types_pb2.Hello()
        self.closed = False
        """Nothing more is sent."""
        self.over = asyncio.Event()
        """Set to end the session from this side; `end_reason` says why."""
        self.end_reason = ""
        self.silent_s = 0.0
        """Since the router's last heartbeat, counted in ticks of our own timer: see `Liveness` of the router."""
        self._outbox = Outbox(MAX_EVENTS)

    def key(self, request_id: str) -> str:
        """A sequence id that is unique on this worker: two routers may choose the same request id."""
        return f"{self.session_id}/{request_id}"

    def end(self, reason: str) -> None:
        """Ends the session from this side."""
        self.end_reason = self.end_reason or reason
        self.over.set()

    def send(self, **event: Any) -> None:
        """Queues an event, named by its field, such as `load=`."""
        envelope = worker_pb2.Events()
        envelope.events.add(**event)
        self.put(envelope.SerializeToString())

    def put(self, events: bytes) -> None:
        """Queues a serialized `Events` of one event; a no-op once the stream is gone. A router that does not read
        loses its session."""
        if not self.closed and not self._outbox.put(events):
            self.end(f"{MAX_EVENTS} events wait to be read")

    def close(self) -> None:
        """Nothing more is sent; what waits to be is dropped. Twice is fine."""
        self.closed = True
        self._outbox.drop()

    async def next_envelope(self) -> bytes | None:
        """The next envelope to write; None once the session is closed."""
        return await self._outbox.take()


class EngineProgress:
    """Looks at the engine's counters at each heartbeat; the engine's thread does nothing for it."""

    def __init__(self, steps: StepCounters) -> None:
        """`steps`: the engine's own, which its thread changes."""
        self._steps = steps
        self._num_turns = -1
        self._looked_at = time.monotonic()
        self._since_turn_s = 0.0

    def heartbeat(self) -> types_pb2.Heartbeat:
        """A heartbeat: the engine's steps so far, whether it has work, and seconds since its last progress."""
        steps, now = self._steps, time.monotonic()
        gap_s, self._looked_at = now - self._looked_at, now
        if steps.waiting or steps.num_turns != self._num_turns:
            self._num_turns = steps.num_turns
            self._since_turn_s = 0.0
        else:
            self._since_turn_s += min(gap_s, MAX_GAP_S)
        return types_pb2.Heartbeat(
            num_steps=steps.num_steps,
            has_work=not steps.waiting,
            since_turn_s=self._since_turn_s,
            longest_step_s=max(steps.longest_s, steps.expected_s),
        )


class Served(Protocol):
    """The part of a worker that its sessions call."""

    host: EngineHost
    spans: SpanSink | None

    def welcome(self) -> types_pb2.Welcome:
        """What the worker is and has, for a router that connects."""

    def on_open(self, session: Session) -> None:
        """A router has connected."""

    def on_closed(self, session: Session) -> None:
        """Drops the requests of a session that is over."""

    def take(self, session: Session, command: worker_pb2.Command) -> None:
        """Carries a command out. Raises nothing: a refusal is sent to the router."""


class SessionServer:
    """Serves the `Session` method of `WorkerService`."""

    def __init__(self, worker: Served, guard: FleetGuard | None = None) -> None:
        """`guard` authenticates drain orders; None: every router may drain the worker."""
        self._worker = worker
        self._guard = guard or FleetGuard()
        self._ids = itertools.count(1)
        self._newest: dict[str, Session] = {}  # by router name, ended ones too: their epochs are refused
        self._progress: EngineProgress | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Serves sessions there, and refuses those of routers that speak protocol 1."""

        async def session(_: Any, context: Context) -> None:
            await self.serve(context)

        async def refuse(_: Any, context: Context) -> None:
            # After its first command: a router whose write fails gets an error of gRPC's in place of this one.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await context.read()
            await abort(context, other_protocol("the router", 1, "this worker"))

        # Events are serialized where they are made.
        served: Any = grpc.stream_stream_rpc_method_handler(session, worker_pb2.Commands.FromString, None)
        refused: Any = grpc.stream_stream_rpc_method_handler(refuse, None, None)
        handlers = {SESSION_SERVICE: served, **dict.fromkeys(OLD_SESSION_SERVICES, refused)}
        server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(name, {"Session": how}) for name, how in handlers.items())
        )

    async def serve(self, context: Context) -> None:
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
            session: Session = Session(next(self._ids), hello.router_name, hello)
            self._replace(session)
        except TandemError as error:
            await abort(context, error)
        logger.info("router %s connected (session %d)", session.router_name, session.session_id)
        welcome = self._worker.welcome()
        welcome.heartbeats = hello.heartbeat_ms > 0
        session.send(welcome=welcome)
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
                    if isinstance(result, Exception) and not isinstance(result, (STREAM_OVER, Unauthenticated)):
                        logger.error("session %d ended by an error", session.session_id, exc_info=result)
            reason = f": {session.end_reason}" if session.end_reason else ""
            logger.info("router %s gone (session %d)%s", session.router_name, session.session_id, reason)
        for result in results:
            if isinstance(result, Unauthenticated):
                await abort(context, result)

    def _replace(self, session: Session) -> None:
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

    def _close(self, session: Session) -> None:
        if not session.closed:
            session.close()
            self._worker.on_closed(session)

    def _check_hello(self, first: worker_pb2.Commands) -> types_pb2.Hello:
        if len(first.commands) != 1 or not first.commands[0].HasField("hello"):
            raise InvalidRequest("the first command of a session must be hello", field="hello")
        hello = first.commands[0].hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise other_protocol(f"router {hello.router_name}", hello.protocol_version, "this worker")
        if hello.sampler_version != SAMPLER_VERSION:
            raise other_sampler(f"router {hello.router_name}", hello.sampler_version, "this worker")
        ours = self._worker.welcome().model_fingerprint
        if hello.model_fingerprint and hello.model_fingerprint != ours:
            raise ModelMismatch(f"this worker {difference(ours, hello.model_fingerprint)}", field="model_fingerprint")
        return hello

    async def _read(self, session: Session, context: Context) -> None:
        """Raises Unauthenticated for an order that the router is not allowed to give; the writer has to end first."""
        while (envelope := await context.read()) is not grpc.aio.EOF and not session.closed:
            for command in envelope.commands:
                self._take(session, context, command)

    def _take(self, session: Session, context: Context, command: worker_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        if kind == "heartbeat":
            session.silent_s = 0.0
            if command.heartbeat.kept_traces and self._worker.spans is not None:
                self._worker.spans.release(command.heartbeat.kept_traces)
            return
        if kind in ("drain", "undrain", "change_weights"):
            try:
                self._guard.check(context)
            except Unauthenticated:
                logger.warning("router %s may not %s this worker", session.router_name, kind)
                raise
        self._worker.take(session, command)

    async def _write(self, session: Session, context: Context) -> None:
        while (events := await session.next_envelope()) is not None:
            if failpoints.armed and await failpoints.strike_async(failpoints.SESSION_SEND):
                continue
            await context.write(events)

    async def _beat(self, session: Session) -> None:
        """Sends heartbeats as the router asked, and returns when the session is to be ended from this side."""
        interval_s = session.hello.heartbeat_ms / 1e3
        while interval_s and not session.over.is_set():
            session.send(heartbeat=self._look())
            begin = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.over.wait(), interval_s)
            late_s = time.monotonic() - begin - interval_s
            if late_s > LATE_S:
                logger.warning("the event loop stood still for %.1f s: routers heard nothing of this worker", late_s)
            session.silent_s += interval_s
            if session.hello.give_up_ms and session.silent_s * 1e3 > session.hello.give_up_ms:
                session.end(f"the router was silent for {session.silent_s:.1f} s")
        await session.over.wait()

    def _look(self) -> types_pb2.Heartbeat:
        if self._progress is None:
            self._progress = EngineProgress(self._worker.host.engine.steps)
        return self._progress.heartbeat()
