"""Probes index and store nodes every second; the cluster's status names those that fail."""

from __future__ import annotations

import asyncio

from shared.block_service.store_nodes import StoreNodes
from shared.errors import TandemError
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import Tier
from shared.tasks import end_task

INTERVAL_S = 1.0


class CacheWatch:
    """`start()` and `close()` are idempotent. It runs in the background; no request waits for it."""

    def __init__(self, index: KVStoreClient | None, nodes: StoreNodes, interval_s: float = INTERVAL_S) -> None:
        """Does not close its arguments."""
        self._index = index
        self._nodes = nodes
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self.failures: tuple[str, ...] = ()
        """Messages about what failed at the last probe."""

    def start(self) -> None:
        """Begins to probe; does nothing without an index and store nodes."""
        if self._task is None and (self._index is not None or self._nodes.names):
            self._task = asyncio.create_task(self._run(), name="cache watch")

    async def close(self) -> None:
        """Ends the probes."""
        task, self._task = self._task, None
        await end_task(task)

    async def look(self) -> tuple[str, ...]:
        """Probes everything once; returns messages about what fails."""
        found = []
        if self._index is not None:
            try:
                await self._index.stats()
            except TandemError as error:
                found.append(f"the index does not answer, placement continues without it: {error}")
        for answer in await self._nodes.ask_all(lambda _, client: client.stats()):
            if answer.error is not None:
                found.append(f"store node {answer.name} does not answer: {answer.error}")
            for tier in answer.value.tiers if answer.value is not None else ():
                if tier.failure:
                    found.append(f"store node {answer.name}, {Tier(tier.tier).name.lower()} tier: {tier.failure}")
        return tuple(found)

    async def _run(self) -> None:
        while True:
            self.failures = await self.look()
            await asyncio.sleep(self._interval_s)
