"""How fast the admission queue empties, measured at the queue itself.

All causes of delay show here: slow prefill, decode workers without room, other routers in front of the same fleet.
"""

from __future__ import annotations

FORGETTING = 0.97
"""The weight of a start halves after about 23 newer ones."""
MIN_STARTS = 8
"""With fewer starts no rate is known."""


class DrainRate:
    """Tokens and seconds of requests that had to wait. Plain numbers, no clock."""

    def __init__(self) -> None:
        self._num_starts = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s = 0.0  # the last start, or the arrival of the first waiting request

    def waiting(self, now_s: float) -> None:
        """A request arrived at an empty queue."""
        self._since_s = now_s

    def started(self, num_tokens: int, now_s: float) -> None:
        """A request left the queue for a worker, after it had waited."""
        self._num_starts += 1
        self._tokens = FORGETTING * self._tokens + num_tokens
        self._seconds = FORGETTING * self._seconds + max(0.0, now_s - self._since_s)
        self._since_s = now_s

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds until `num_tokens` have left; 0 before enough starts were seen. Call it while requests wait: the
        estimate of a stalled queue grows with time."""
        if self._num_starts < MIN_STARTS:
            return 0.0
        return num_tokens * (self._seconds + max(0.0, now_s - self._since_s)) / self._tokens
