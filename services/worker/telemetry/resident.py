"""How much memory this process holds."""

from __future__ import annotations

import os
from pathlib import Path

REFRESH_S = 1.0
"""Reports come every few milliseconds; the figure moves slowly."""


class ResidentMemory:
    """Resident set size as Linux counts it, read at most once in REFRESH_S."""

    def __init__(self, statm: Path = Path("/proc/self/statm")) -> None:
        """`statm` is in the format of proc(5): sizes in pages, the resident one second."""
        self._statm = statm
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._read_at = float("-inf")
        self._num_bytes: int | None = None

    def num_bytes(self, now: float) -> int | None:
        """In bytes; None where the system has no such file. `now` is a monotonic time in seconds."""
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            try:
                self._num_bytes = int(self._statm.read_text().split()[1]) * self._page_bytes
            except (OSError, IndexError, ValueError):
                self._num_bytes = None
        return self._num_bytes
