"""Work over blocks' bytes, kept from holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.tasks import unbroken

AT_ONCE_BYTES = 64 << 10
"""Up to this many bytes are read on the loop, within some 50 µs: a thread would take longer to wake."""

T = TypeVar("T")


async def beside_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which reads `num_bytes`. It runs to its end even where the caller is cancelled, and
    the cancel is raised only then: until then the bytes stay in use."""
    if num_bytes <= AT_ONCE_BYTES:
        return work()
    return await unbroken(asyncio.to_thread(work))
