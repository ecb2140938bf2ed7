"""Prunes what superseded incarnations left in the index, a little at a time, behind everyone's back."""

from __future__ import annotations

import asyncio
import logging
import time

from services.kvstore.holder_table import HolderTable, TableVersion
from services.kvstore.records import VERSION_KEY
from services.kvstore.redis_client import RedisClient
from services.kvstore.redis_index import read_table
from services.kvstore.scripts import OTHER_EPOCH, RETIRE, SWEEP
from shared.errors import StoreUnavailable, TandemError
from shared.tasks import end_task

logger = logging.getLogger(__name__)

KEYS_PER_STEP = 512
PAUSE_S = 0.005
"""Between two steps, so that matches pass in between."""
RETIRED_MAX_AGE_S = 86_400
"""How long a swept incarnation is remembered as dead: longer than any stalled process lives on."""


class Sweeper:
    """Looks every `interval_s` seconds whether workers were superseded and walks the index when they were.

    Nothing waits for it: dead holders are ignored from the first moment. Sweepers of several stores over one index
    do the same work twice, harmlessly: every step is atomic and idempotent. `start()`/`close()`; twice is fine.
    """

    def __init__(self, redis: RedisClient, interval_s: float) -> None:
        self._redis = redis
        self._interval_s = interval_s
        self._clean: TableVersion | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="index sweeper")

    async def close(self) -> None:
        """Stops, in the middle of a walk if need be; the next one starts over."""
        if self._task is not None:
            task, self._task = self._task, None
            await end_task(task)

    async def sweep(self) -> int:
        """One look, and one walk if there is something to prune; returns the records pruned.

        Raises StoreUnavailable.
        """
        version = await self._redis.command("GET", VERSION_KEY)
        if version is None or TableVersion.parse(version) == self._clean:
            return 0
        table = await read_table(self._redis)
        if table is None:
            return 0
        num_pruned = await self._walk(table) if table.dead else 0
        self._clean = table.version
        return num_pruned

    async def _walk(self, table: HolderTable) -> int:
        """Over all keys once, then the dead leave the table: nothing can name them any more."""
        started = time.monotonic()
        cursor = "0"
        num_pruned = 0
        while True:
            [(cursor_bytes, pruned)] = await self._redis.scripts(
                SWEEP, (table.version.epoch, cursor, KEYS_PER_STEP, *table.dead)
            )
            if pruned == OTHER_EPOCH:
                return num_pruned
            num_pruned += int(pruned)
            cursor = cursor_bytes.decode()
            if cursor == "0":
                break
            await asyncio.sleep(PAUSE_S)
        now = int(time.time())
        await self._redis.scripts(RETIRE, (table.version.epoch, now, now - RETIRED_MAX_AGE_S, *table.dead.values()))
        logger.info(
            "pruned %d records of %d superseded workers in %.1f s",
            num_pruned,
            len(table.dead),
            time.monotonic() - started,
        )
        return num_pruned

    async def _run(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreUnavailable:
                pass  # the store's health says so already
            except TandemError as error:
                logger.error("the sweep of superseded workers failed: %s", error)
            await asyncio.sleep(self._interval_s)
