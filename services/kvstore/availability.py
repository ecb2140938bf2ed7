"""Whether the index answers. All calls share this state, so that only the first one waits for a Redis that does not
answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import StoreUnavailable
from shared.tasks import end_task

T = TypeVar("T")


class Availability:
    """Probes every `interval_s` seconds, and at once when a call failed. `start()` and `close()` are idempotent."""

    def __init__(
        self,
        probe: Callable[[], Awaitable[object]],
        on_change: Callable[[StoreUnavailable | None], Awaitable[None]],
        interval_s: float,
    ) -> None:
        """`probe` raises StoreUnavailable while the index does not answer. `on_change` is called once for each
        change, and once by `start()`: with that error, or with None when the index answers again."""
        self._probe = probe
        self._on_change = on_change
        self._interval_s = interval_s
        self._error: StoreUnavailable | None = StoreUnavailable("the index has not been probed yet")
        self._suspected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether the last probe was answered."""
        return self._error is None

    def require(self) -> None:
        """Raises StoreUnavailable at once, without I/O, while the index does not answer."""
        if self._error is not None:
            raise StoreUnavailable(self._error.message, **self._error.details)

    def suspect(self) -> None:
        """Probes now, because a call failed. Only probes change the state: one slow answer closes nothing."""
        self._suspected.set()

    async def watched(self, work: Awaitable[T]) -> T:
        """What a call on the index returns or raises; after a StoreUnavailable the index is suspected."""
        try:
            return await work
        except StoreUnavailable:
            self.suspect()
            raise

    async def start(self) -> None:
        """Returns after the first probe."""
        if self._task is None:
            self._error = await self._probe_once()
            await self._on_change(self._error)
            self._task = asyncio.create_task(self._run(), name="index probe")

    async def close(self) -> None:
        """Stops probing."""
        task, self._task = self._task, None
        await end_task(task)

    async def _probe_once(self) -> StoreUnavailable | None:
        try:
            await self._probe()
        except StoreUnavailable as error:
            return error
        return None

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._suspected.wait()
            self._suspected.clear()
            before, self._error = self._error, await self._probe_once()
            if (before is None) != (self._error is None):
                await self._on_change(self._error)
