"""Wakes those who write to clients a few at a time, so that reading what workers say always comes first.

A message to a client costs more than reading its token. With every reader woken by every token, a router that is short
of time would spend it on ever older tokens, while newer ones pile up unread in gRPC's buffers. So one pass of the event
loop wakes at most `limit` readers, in the order in which something came for them, and reads what has arrived before the
next pass. What comes for a reader that still waits for its turn goes out in the same message. An idle router wakes a
reader in its very next pass, so nothing is held back for company.
"""

from __future__ import annotations

import asyncio
from collections import deque

LIMIT = 8
"""Readers a pass: about half a millisecond of writing."""


class Turns:
    """For the readers of one event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passing = False  # the next pass is on its way

    def take(self, reader: asyncio.Future[None]) -> None:
        """Sets the future's result in one of the next passes, never in this call."""
        self._waiting.append(reader)
        if not self._passing:
            self._passing = True
            reader.get_loop().call_soon(self._pass)

    def _pass(self) -> None:
        waiting = self._waiting
        for _ in range(min(self._limit, len(waiting))):
            reader = waiting.popleft()
            if not reader.done():  # else its task was cancelled meanwhile
                reader.set_result(None)
        self._passing = bool(waiting)
        if self._passing:
            asyncio.get_running_loop().call_soon(self._pass)
