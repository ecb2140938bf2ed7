"""Load with a fault in the middle of it, disks that are really full or read-only, and what the index says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

from redis.asyncio import Redis

from services.kvstore.index.holder_table import holder_ids
from services.kvstore.index.redis_index import read_table
from services.kvstore.resp.open import redis_client
from services.router.cache.watch import CacheWatch
from shared.block_service.store_nodes import StoreNodes
from shared.kv_index.holders import Holder
from tests.e2e.stage import Stage, prompt
from tests.waiting import until

PROMPT_LEN = 150
NUM_AT_ONCE = 6


class Load:
    """Prompts, half of them repeated, whose answers without any fault are known."""

    def __init__(self, stage: Stage, num_requests: int = 24, num_prompts: int = 8) -> None:
        self._stage = stage
        self._prompts = [prompt(PROMPT_LEN, seed=37 + 2 * (i % num_prompts)) for i in range(num_requests)]
        self._num_prompts = num_prompts
        self.num_done = 0

    async def run(self, fault: Callable[[], Awaitable[None]]) -> None:
        """Asks all, `fault` strikes when some are answered; every answer must be what it is without faults."""
        expected = [(await self._stage.ask(tokens, tenant="calm"))[0] for tokens in self._prompts[: self._num_prompts]]
        gate = asyncio.Semaphore(NUM_AT_ONCE)

        async def ask(number: int) -> list[int]:
            async with gate:
                answer, _ = await self._stage.ask(self._prompts[number])
            self.num_done += 1
            return answer

        asking = [asyncio.create_task(ask(number)) for number in range(len(self._prompts))]
        await self._stage.until(lambda: self.num_done >= 4)
        await fault()
        answers = await asyncio.gather(*asking)
        assert answers == [expected[number % self._num_prompts] for number in range(len(self._prompts))]


@contextlib.asynccontextmanager
async def watched(stage: Stage) -> AsyncIterator[Callable[[Callable[[tuple[str, ...]], bool]], Awaitable[None]]]:
    """Waits until the router's view of what fails fulfils a condition."""
    nodes = StoreNodes({"store-0": stage.index.address})
    watch = CacheWatch(stage.index, nodes)

    async def seen(condition: Callable[[tuple[str, ...]], bool]) -> None:
        async def fulfilled() -> bool:
            return condition(await watch.look())

        await until(fulfilled)

    try:
        yield seen
    finally:
        await nodes.close()


async def blocks_by_holder(redis_url: str) -> dict[Holder, set[bytes]]:
    """What the index says, read from Redis itself: the blocks of every live holder."""
    client = redis_client(redis_url, 5.0)
    try:
        table = await read_table(client)
        found: dict[Holder, set[bytes]] = defaultdict(set)
        if table is None:
            return found
        async with Redis.from_url(redis_url, protocol=2, driver_info=None) as redis:
            keys = [key async for key in redis.scan_iter(b"b:*")]
            values = await redis.mget(keys) if keys else []
        for key, value in zip(keys, values, strict=True):
            for holder_id in holder_ids(value or b""):
                if holder_id in table.live:
                    found[table.live[holder_id]].add(key[-16:])
        return found
    finally:
        await client.close()
