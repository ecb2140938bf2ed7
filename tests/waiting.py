"""How long a test waits for what must come, and the one loop by which it waits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

DEADLINE_S = 300.0
"""Limit on one step of progress: ten times what the longest takes on a slow machine that does other work. Seconds."""
LOOK_S = 0.01
"""Between two looks."""

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], within_s: float = DEADLINE_S) -> T:
    """The first true value that `condition`, a function or a coroutine function, returns.

    Raises TimeoutError where there is none within `within_s` seconds.
    """
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            value = await found if inspect.isawaitable(found) else found
            if value:
                return value
            await asyncio.sleep(LOOK_S)
