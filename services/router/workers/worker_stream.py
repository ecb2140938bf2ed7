"""One session's stream: commands down, events up, heartbeats both ways, until it ends or the worker is given up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from time import monotonic

import grpc.aio

from services.router.workers.liveness import Liveness, LivenessLimits
from shared.errors import WorkerLost
from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

BEATS_OF_LIFE = 2
"""Heartbeats that show that a worker lives: one may have been on its way when it died."""
MAX_OUTGOING = 16_384
"""Commands that may wait for a worker to read them; then its session is ended."""

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
