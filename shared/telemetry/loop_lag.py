"""How long a process's event loop keeps others waiting, seen from inside: by the clock, and by its own computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

PERIOD_S = 0.01
"""Between two looks."""
WINDOW_S = 30.0
"""The largest values of the present and the last stretch of this length are shown."""


class LoopLag:
    """Looks at the loop that it is started on. A look costs a few microseconds."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._computed = self._window_end = 0.0
        self._now = self._last = (0.0, 0.0)  # largest lag and largest computing, seconds, of this window and the last

    def start(self) -> None:
        """Begins to look; in the loop's thread."""
        self._window_end = time.perf_counter() + WINDOW_S
        self._arm()

    def close(self) -> None:
        """Looks no more; twice is fine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def largest_s(self) -> Mapping[str, float]:
        """`clock`: how late a timer came, the machine's other work included. `computing`: processor time of the loop's
        thread between two looks, so at least that of its longest turn. Of the last WINDOW_S to twice that."""
        return {"clock": max(self._now[0], self._last[0]), "computing": max(self._now[1], self._last[1])}

    def _arm(self) -> None:
        self._due = time.perf_counter() + PERIOD_S
        self._computed = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        now = time.perf_counter()
        late_s, busy_s = now - self._due, time.thread_time() - self._computed
        if now >= self._window_end:
            self._last, self._now = self._now, (0.0, 0.0)
            self._window_end = now + WINDOW_S
        self._now = (max(self._now[0], late_s), max(self._now[1], busy_s))
        self._arm()
