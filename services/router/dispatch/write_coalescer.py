"""Wakes the writers to clients, so that a busy router sends fewer messages, not older ones.

A message to a client costs more than reading its token. If every reader wrote whenever it has one, a busy router would
spend its core on messages of one token, while newer tokens pile up unread in gRPC's buffers. So all readers that have
something are woken in one pass, and the next pass begins only when some time in proportion to the last one's length
has gone by: writing gets a share of the core, and what comes for a stream meanwhile goes out in one message. An idle
router's pass is over in microseconds, so nothing is held back there. A first token never waits.
"""

from __future__ import annotations

import asyncio
import time

PAUSE = 2.0
"""From the end of a pass to the next one, in lengths of the pass. A write is paid for about twice, in the pass and when
gRPC reports that it is done; the rest is for reading. Less sends more messages with fewer tokens in each."""
MAX_PAUSE_S = 0.1
"""However long a pass took: something else than writing may have held it up."""
MIN_PAUSE_S = 0.001
"""Less is none: timers are no finer."""


class WriteCoalescer:
    """For the readers of one event loop."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._waiting: list[asyncio.Future[None]] = []
        self._passing = False  # the next pass is on its way, or one is being written
        self._next_s = 0.0  # perf_counter() before which no pass begins

    def take(self, reader: asyncio.Future[None], *, now: bool = False) -> None:
        """Sets the future's result in the next pass, or with `now` in the loop's next turn; never in this call."""
        if now:
            reader.get_loop().call_soon(_wake, reader)
            return
        self._waiting.append(reader)
        if not self._passing:
            self._begin(reader.get_loop())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passing = True
        pause_s = self._next_s - time.perf_counter()
        if pause_s < MIN_PAUSE_S:
            loop.call_soon(self._pass, loop)
        else:
            loop.call_later(pause_s, self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        readers, self._waiting = self._waiting, []
        began_s = time.perf_counter()
        for reader in readers:
            _wake(reader)
        # Their tasks stand in the loop's queue now, and this call behind them.
        loop.call_soon(self._written, loop, began_s)

    def _written(self, loop: asyncio.AbstractEventLoop, began_s: float) -> None:
        now_s = time.perf_counter()
        self._next_s = now_s + min(MAX_PAUSE_S, self._pause * (now_s - began_s))
        self._passing = False
        if self._waiting:
            self._begin(loop)


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():  # else its task was cancelled meanwhile
        reader.set_result(None)
