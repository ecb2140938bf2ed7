"""One router's stream, as the worker sees it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Session(Generic[EventT]):
    """Sends events to one router. `SessionServer` opens and closes it."""

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
