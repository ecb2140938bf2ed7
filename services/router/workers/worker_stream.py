"""One session's stream: commands down, events up, heartbeats both ways, until it ends or the worker is given up."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from services.router.workers.liveness import Liveness, LivenessLimits
from shared.errors import TandemError, WorkerLost
from shared.rpc.errors import from_rpc_error
from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.protocol import other_protocol

BEATS_OF_LIFE = 2
"""Heartbeats that show that a worker lives: one may have been on its way when it died."""
MAX_OUTGOING = 16_384
"""Commands that may wait for a worker to read them; then its session is ended."""

HELLO_TIMEOUT_S = 10.0
"""For the answer to a hello."""
REFUSED_WITHIN_S = 1.0
"""A worker that knows the method waits for longer than this for a hello."""

logger = logging.getLogger(__name__)

SessionCall = grpc.aio.StreamStreamCall[bytes, bytes]
"""Takes serialized `Commands`, gives serialized `Events`."""


class WorkerStream:
    """A session has its own: of one that is over nothing reaches the next. For the event loop's thread alone."""

    def __init__(
        self,
        worker_name: str,
        limits: LivenessLimits,
        heartbeat: Callable[[], bytes],
        on_event: Callable[[worker_pb2.Event], None],
        on_judged: Callable[[], None],
        *,
        heartbeats: bool,
    ) -> None:
        """`heartbeat` makes the router's own as a serialized `Commands`; `on_event` takes every event of the worker,
        heartbeats included, and gives those back to `take_beat`. `on_judged` is called whenever `suspicion` may have
        changed. `heartbeats`: whether the worker sends any; one that sends none is not suspected."""
        self._name = worker_name
        self._limits = limits
        self._heartbeat = heartbeat
        self._on_event = on_event
        self._on_judged = on_judged
        self._heartbeats = heartbeats
        self._liveness = Liveness(limits)
        self._outbox = Outbox(MAX_OUTGOING)
        self._overflowed = asyncio.Event()
        self._beat = asyncio.Event()  # of one heartbeat: the next has another
        self._ticked_at = monotonic()
        self._is_over = False

    @property
    def suspicion(self) -> str:
        """Why the worker should get no new work; empty while it is well."""
        return self._liveness.suspicion if self._heartbeats else ""

    @property
    def has_slept(self) -> bool:
        """This router was itself stopped just now: that the connection broke says nothing of the worker."""
        return self._heartbeats and self._liveness.has_slept(monotonic() - self._ticked_at)

    def send(self, commands: bytes) -> None:
        """Queues a serialized `Commands` of one command; a worker that does not read loses its session."""
        if not self._outbox.put(commands):
            self._overflowed.set()

    def close_sending(self) -> None:
        """No more commands will come; the worker ends the stream after it has read the last one."""
        self._outbox.close()

    def take_beat(self, beat: types_pb2.Heartbeat) -> None:
        """A heartbeat came."""
        self._wake_hearers()
        self._liveness.heard(beat)
        self._on_judged()

    async def heard(self) -> None:
        """Returns once the worker was heard from anew, or the stream is over; at once where it sends no heartbeats."""
        for _ in range(BEATS_OF_LIFE if self._heartbeats else 0):
            if not self._is_over:
                await self._beat.wait()

    def end(self) -> None:
        """The session is over: ends the waits of `heard`."""
        self._is_over = True
        self._wake_hearers()

    async def run(self, call: SessionCall) -> None:
        """Reads and writes until the stream ends, or the worker is given up: raises WorkerLost."""
        ends: list[asyncio.Task[None]] = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._watch_queue()),
        ]
        if self._heartbeats:
            ends.append(asyncio.create_task(self._watch()))
        writer = asyncio.create_task(self._write(call))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, writer):
                task.cancel()
            await asyncio.gather(*ends, writer, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, call: SessionCall) -> None:
        async for envelope in call:  # half the Python of `read`
            for event in worker_pb2.Events.FromString(envelope).events:
                self._on_event(event)

    async def _write(self, call: SessionCall) -> None:
        while (commands := await self._outbox.take()) is not None:
            await call.write(commands)
        await call.done_writing()

    async def _watch(self) -> None:
        """Sends heartbeats, and misses the worker's; one timer a session. Raises WorkerLost to give the worker up."""
        self._ticked_at = monotonic()
        for tick in itertools.count():
            if self._liveness.loss:
                raise WorkerLost(f"worker {self._name} is given up: {self._liveness.loss}")
            if tick % self._limits.ticks_a_beat == 0:
                self.send(self._heartbeat())
            await asyncio.sleep(self._limits.interval_s)
            before, self._ticked_at = self._ticked_at, monotonic()
            self._liveness.tick(self._ticked_at - before)
            self._on_judged()

    async def _watch_queue(self) -> None:
        await self._overflowed.wait()
        raise WorkerLost(f"worker {self._name} is given up: it does not read its commands")

    def _wake_hearers(self) -> None:
        self._beat.set()
        self._beat = asyncio.Event()


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
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
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
