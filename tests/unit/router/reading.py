"""Reading a running request as the edge does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from services.router.dispatch.request import RunningRequest, TokenDelta


async def deltas(running: RunningRequest) -> AsyncGenerator[TokenDelta, None]:
    """All deltas in order; raises what the request raises."""
    while not running.ended:
        reader = asyncio.get_running_loop().create_future()
        running.notify(reader)
        await reader
        if (delta := running.take()) is not None:
            yield delta
