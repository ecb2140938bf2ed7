"""What every discovery does. A kind's tests bring a fixture `make` and import the tests below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from services.router.workers.discovery import DiscoveredWorker, Discovery
from shared.identity import DECODE, PREFILL

DEADLINE_S = 300.0
D0 = DiscoveredWorker("d0", DECODE, "10.0.0.2:50061")
D1 = DiscoveredWorker("d1", DECODE, "[fd00::1]:50061", ("z",))
P0 = DiscoveredWorker("p0", PREFILL, "10.0.0.1:50061", ("z", "r"))

Make = Callable[[Sequence[DiscoveredWorker]], Discovery]
"""Makes the discovery under test over these workers."""


class Followed:
    """A started discovery, and the views at its calls of `on_change`."""

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self.views: list[tuple[DiscoveredWorker, ...]] = []

    def on_change(self) -> None:
        self.views.append(self.discovery.workers)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def follow(discovery: Discovery) -> AsyncIterator[Followed]:
    followed = Followed(discovery)
    discovery.start(followed.on_change)
    try:
        yield followed
    finally:
        await discovery.close()


@pytest.mark.parametrize("workers", [(), (P0,), (D0, D1, P0)])
async def test_the_view_is_there_soon_after_the_start_in_the_order_of_the_source(make, workers):
    async with follow(make(workers)) as followed:
        await followed.until(lambda: followed.discovery.workers == workers and not followed.discovery.failure)
        assert followed.views in ([], [workers])


async def test_nothing_is_read_before_the_start_and_close_twice_is_fine(make):
    discovery = make((P0,))
    await discovery.close()
    await discovery.close()
    async with follow(make((D0,))) as followed:
        await followed.until(lambda: followed.discovery.workers == (D0,))
        await followed.discovery.close()
        await followed.discovery.close()
        assert followed.discovery.workers == (D0,)
