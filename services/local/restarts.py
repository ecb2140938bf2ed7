"""When a part that died is started again, and when it is given up. Pure policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MAX_DEATHS = 3
"""A part that died this often …"""
WINDOW_S = 60.0
"""… within this time is not started again. Seconds."""
FIRST_DELAY_S = 0.2
"""Pause before the first start in a window; it doubles with every further one. Seconds."""
JITTER = 0.5
"""A pause is longer by up to this share, so that parts that died together do not start together."""


class Restarts:
    """The deaths of one part."""

    def __init__(self, random: Callable[[], float]) -> None:
        """`random()` gives numbers in [0, 1)."""
        self._random = random
        self._deaths: deque[float] = deque()

    def on_death(self, now: float) -> float | None:
        """Seconds until it should be started again; None to give it up. `now` is any steady clock's, in seconds."""
        self._deaths.append(now)
        while self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            return None
        pause = FIRST_DELAY_S * 2.0 ** (len(self._deaths) - 1)
        return pause * (1.0 + JITTER * self._random())
