"""How often each part has died lately: the supervisor gives a part up at its third death within a minute."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

from services.local.restarts import MAX_DEATHS, WINDOW_S

_MARGIN_S = 5.0
"""A part dies a moment after it was told to."""


class Deaths:
    """Of one cluster's parts."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def note(self, parts: Iterable[str]) -> None:
        """These die now."""
        for part in parts:
            self._times[part].append(time.monotonic())

    async def wait(self, parts: Iterable[str]) -> None:
        """Until one more death of any of these would not be its last."""
        for part in parts:
            times = self._times[part]
            if len(times) >= MAX_DEATHS - 1:
                oldest = times[1 - MAX_DEATHS]
                await asyncio.sleep(max(0.0, oldest + WINDOW_S + _MARGIN_S - time.monotonic()))
