"""How fast the admission queue empties, measured where it happens.

Whatever holds requests up shows here: slow prefill, decode workers without room, other routers before the same fleet.
"""

from __future__ import annotations

FORGETTING = 0.97
"""A start's weight falls to a half after about 23 later ones."""
MIN_STARTS = 8
"""With fewer, no rate is given."""


class DrainRate:
    """Tokens and seconds of the requests that had to wait. Plain numbers, no clock."""

    def __init__(self) -> None:
        self._num_starts = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s = 0.0  # the last start, or when the first request began to wait

    def waiting(self, now_s: float) -> None:
        """A request came to an empty queue."""
        self._since_s = now_s

    def started(self, num_tokens: int, now_s: float) -> None:
        """A request left the queue for a worker, after it had waited."""
        self._num_starts += 1
        self._tokens = FORGETTING * self._tokens + num_tokens
        self._seconds = FORGETTING * self._seconds + max(0.0, now_s - self._since_s)
        self._since_s = now_s

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds until `num_tokens` have left; 0 before enough starts were seen. Call it while requests wait: a queue
        that stands still counts as slower from moment to moment."""
        if self._num_starts < MIN_STARTS:
            return 0.0
        return num_tokens * (self._seconds + max(0.0, now_s - self._since_s)) / self._tokens
