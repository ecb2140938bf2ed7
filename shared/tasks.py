"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ASK_AGAIN_S = 0.1


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and returns when it has ended; raises the task's error, but not its cancellation. None: no task.

    Cancels repeatedly: `asyncio.wait_for` before Python 3.12, through which redis-py sends, swallows a cancellation
    that arrives just when the awaited future is done. An endless loop would then never be cancelled.
    """
    if task is None:
        return
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_ASK_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; where the caller is cancelled it still runs to its end, and the cancellation comes then."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        raise cancelled
    return task.result()
