"""A limit on bytes sent per second."""

from __future__ import annotations

import asyncio
import time


class RateLimiter:
    """Lets `bytes_per_s` pass on average; 0 = no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def spend(self, num_bytes: int) -> None:
        """Counts `num_bytes`; returns when they and all earlier bytes fit the rate."""
        if self._bytes_per_s and num_bytes:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)
