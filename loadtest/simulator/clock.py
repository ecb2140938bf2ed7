"""Simulated time: a heap of callbacks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs callbacks in the order of their times; ties in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._ticks = count()

    def at(self, time_s: float, call: Callable[..., None], *args: object) -> None:
        """Calls `call(*args)` at that time, at once if it is past."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._ticks), call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """Calls `call(*args)` `delay_s` from now."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._ticks), call, args))

    def run(self) -> None:
        """Runs until no callback is left."""
        heap = self._heap
        while heap:
            self.now_s, _, call, args = heapq.heappop(heap)
            self.num_events += 1
            call(*args)
