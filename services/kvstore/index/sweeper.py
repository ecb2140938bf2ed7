"""Forgets workers that fell silent, and prunes dead holders' records from the index, in small steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.kvstore.index.holder_table import HOLDER_ID_BYTES, VERSION_KEY, HolderTable, holder_ids
from services.kvstore.index.redis_index import TABLE_SLOT, Buckets, read_table
from services.kvstore.index.scripts import EXPIRE, REMOVE, TABLE_KEYS
from services.kvstore.resp.client import RedisClient, replies_of
from services.kvstore.resp.command import Command
from services.kvstore.resp.redis_node import RedisConnection, RedisNode
from shared.errors import StoreUnavailable, TandemError
from shared.tasks import end_task

logger = logging.getLogger(__name__)

KEYS_PER_STEP = 512
PAUSE_S = 0.005
"""Pause between two steps, so that matches can run. Seconds."""


@dataclass(slots=True)
class SweepCounters:
    """Sums since start."""

    num_sweeps: int = 0
    num_pruned: int = 0  # records of dead holders
    num_expired: int = 0  # holders that sent nothing for a whole lease


class Sweeper:
    """Checks every `interval_s` seconds for dead holders; if there are any, walks the index.

    Correctness does not depend on it: matches ignore dead holders at once. Sweepers of several stores over one index
    repeat each other's work, which is harmless: every step is idempotent. `start()` and `close()` are idempotent.
    """

    def __init__(
        self,
        redis: RedisClient,
        interval_s: float,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A holder that is silent for `lease_s` seconds is forgotten."""
        self.counters = SweepCounters()
        self._redis = redis
        self._buckets = Buckets.of(redis)
        self._interval_s = interval_s
        self._lease_s = lease_s
        self._clock = clock
        self._answering_since: float | None = None  # by the clock; None while Redis does not answer
        self._clean: tuple[bytes, int] | None = None  # epoch and number of deaths that the last walk saw
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the checks."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="index sweeper")

    async def close(self) -> None:
        """Stops, even in the middle of a walk; the next walk starts over."""
        task, self._task = self._task, None
        await end_task(task)

    async def expire(self) -> int:
        """Forgets holders that sent nothing for the whole lease; returns how many. Raises StoreUnavailable.

        Does so only after Redis has answered for a whole lease: during an outage no holder can publish.
        """
        now = self._clock()
        if self._answering_since is None:
            self._answering_since = now
        if now - self._answering_since < self._lease_s:
            return 0
        [num_silent] = await self._redis.call(Command.script(EXPIRE, TABLE_KEYS, (str(self._lease_s),), TABLE_SLOT))
        if num_silent:
            logger.warning("%d workers sent nothing for %g s: their blocks are forgotten", num_silent, self._lease_s)
        self.counters.num_expired += int(num_silent)
        return int(num_silent)

    async def sweep(self) -> int:
        """One check, and one walk if there is something to prune; returns the number of records pruned.

        Raises StoreUnavailable.
        """
        [version] = await self._redis.call(Command.of("GET", VERSION_KEY, slot=TABLE_SLOT))
        table = await read_table(self._redis) if version is not None else None
        self.counters.num_sweeps += 1
        if table is None:
            return 0
        state = (table.version.epoch, table.num_deaths)
        if state == self._clean:
            return 0
        num_pruned = 0
        if table.num_deaths:
            started = time.monotonic()
            for node in await self._redis.nodes():
                num_pruned += await self._walk(node, table)
            logger.info("pruned %d records of dead holders in %.1f s", num_pruned, time.monotonic() - started)
        self._clean = state
        self.counters.num_pruned += num_pruned
        return num_pruned

    async def _walk(self, node: RedisNode, table: HolderTable) -> int:
        """Walks all keys of one node; returns the number of records pruned."""
        cursor, num_pruned = b"0", 0
        while True:
            [(cursor, keys)] = replies_of(
                node, await node.ask([Command.of("SCAN", cursor, "COUNT", KEYS_PER_STEP)], RedisConnection.WRITE)
            )
            hashes = b"".join(found for key in keys if (found := self._buckets.hash_of(key)) is not None)
            if hashes:
                num_pruned += await self._prune(hashes, table)
            if cursor == b"0":
                return num_pruned
            await asyncio.sleep(PAUSE_S)

    async def _prune(self, hashes: bytes, table: HolderTable) -> int:
        """Removes dead holders' records of these blocks. Records are read before the table, and holders register before
        they write records. So an id that is not in the table is dead, not newer than the table."""
        read = self._buckets.read(hashes, VERSION_KEY)
        _, values = read.collect(await self._redis.call(*read.commands))
        whole = {value for value in values if value and len(value) % HOLDER_ID_BYTES == 0}  # a read names a damaged one
        ids = {holder_id for value in whole for holder_id in holder_ids(value)}
        if ids <= table.live.keys():
            return 0
        now = await read_table(self._redis)
        dead = sorted(ids - now.live.keys()) if now is not None else []
        if not dead:
            return 0
        commands = [
            Command.script(
                REMOVE, (self._buckets.prefixes[part.bucket],), (part.hashes, *dead), self._buckets.slots[part.bucket]
            )
            for part in self._buckets.parts(hashes, KEYS_PER_STEP)
        ]
        return sum(await self._redis.call(*commands))

    async def _run(self) -> None:
        while True:
            try:
                await self.expire()
                await self.sweep()
            except StoreUnavailable:
                self._answering_since = None  # the store's health already reports it
            except TandemError as error:
                logger.error("the sweep of dead holders failed: %s", error)
            except Exception:
                logger.exception("a bug stopped a sweep of dead holders")
            await asyncio.sleep(self._interval_s)
