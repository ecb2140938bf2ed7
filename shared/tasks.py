"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any

_ASK_AGAIN_S = 0.1


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task and returns when it has ended; raises what it ended with, save its cancellation.

    Asks again until it works: `asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives in the
    moment in which what it waits for is done, and redis-py sends through it. An endless loop would never hear of it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_ASK_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
