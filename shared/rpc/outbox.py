"""What waits to be written to a session's stream: everything of one turn of the event loop leaves as one message."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_ENVELOPE_BYTES = 1 << 20
"""An envelope takes no further message once it has this size: it stays far below gRPC's limit for one message."""


class Outbox:
    """Serialized envelopes in the order in which they were put. For one event loop, with one writer.

    Protobuf appends the repeated fields of messages whose bytes follow each other. So each message is serialized once,
    in an envelope of its own, and the writer joins the envelopes that wait: a gRPC operation costs more than the rest
    of what a router does for a command.
    """

    def __init__(self, limit: int) -> None:
        """At most `limit` messages wait."""
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._writer: asyncio.Future[None] | None = None  # while it waits
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, envelope: bytes) -> bool:
        """Queues an envelope; False where too many wait, and it is dropped."""
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append(envelope)
        self._wake_writer()
        return True

    def close(self) -> None:
        """Nothing more is put; what waits is still taken. Twice is fine."""
        self._is_closed = True
        self._wake_writer()

    def drop(self) -> None:
        """As `close`, and nothing of what waits is taken."""
        self._waiting.clear()
        self.close()

    async def take(self) -> bytes | None:
        """Waits for envelopes, and returns them joined; None once it is closed and empty."""
        while not self._waiting:
            if self._is_closed:
                return None
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        taken = [self._waiting.popleft()]
        num_bytes = len(taken[0])
        while self._waiting and num_bytes < MAX_ENVELOPE_BYTES:
            num_bytes += len(self._waiting[0])
            taken.append(self._waiting.popleft())
        return b"".join(taken) if len(taken) > 1 else taken[0]

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():  # else it was cancelled
            writer.set_result(None)
