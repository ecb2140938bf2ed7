"""One router's stream, as the worker sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

MAX_EVENTS = 65_536
"""Events that may wait for a router to read them; then its session is ended. A step is one event."""


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
        self._outbox.close()

    async def next_envelope(self) -> bytes | None:
        """The next envelope to write; None once the session is closed."""
        events = await self._outbox.take()
        return None if self.closed else events
