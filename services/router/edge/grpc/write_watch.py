"""Ends a call whose client does not read."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from shared.errors import Cancelled


class WriteWatch:
    """`async with` around a writer: when one write takes longer than `timeout_s`, its task is cancelled and the block
    raises Cancelled. A write costs two calls of a few instructions and no timer: there is one for each token."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._begun_at: float | None = None  # of the write in progress, the loop's time
        self._expired = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A write begins."""
        self._begun_at = self._loop.time()

    def end(self) -> None:
        """The write has ended."""
        self._begun_at = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._arm(self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and isinstance(error, asyncio.CancelledError) and self._task is not None:
            self._task.uncancel()
            raise Cancelled(f"the client read nothing for {self._timeout_s:g} s") from None

    def _arm(self, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        waited_s = 0.0 if self._begun_at is None else self._loop.time() - self._begun_at
        if waited_s < self._timeout_s:
            self._arm(self._timeout_s - waited_s)
            return
        self._expired = True
        assert self._task is not None
        self._task.cancel()
