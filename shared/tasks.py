"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any

_ASK_AGAIN_S = 0.1


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task and returns when it has ended; raises the task's error, but not its cancellation.

    Cancels repeatedly: `asyncio.wait_for` before Python 3.12, through which redis-py sends, swallows a cancellation
    that arrives just when the awaited future is done. An endless loop would then never be cancelled.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_ASK_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
