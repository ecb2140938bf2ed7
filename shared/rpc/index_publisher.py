"""Tells the KV store what a worker's pool holds, behind the worker's back: nothing in the engine waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from shared.errors import StoreUnavailable, TandemError
from shared.rpc.block_holders import Tier, WorkerIdentity
from shared.tasks import end_task

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.02
MAX_BATCH = 4096
MAX_BACKLOG = 262_144
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0


class IndexWriter(Protocol):
    """The part of KVStoreClient that publishes."""

    async def publish(self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        """The worker holds these blocks now."""

    async def remove(self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        """The worker holds these blocks no more."""


class IndexPublisher:
    """Sends changes in batches: 20 ms after the first, or at once when 4096 wait. One batch is on its way at a time.

    Order is kept by remembering, for each block, only what became of it last: a batch holds a hash once, and
    whatever is offered while it travels goes with a later one. Both calls are idempotent, so a batch that failed
    half-way is sent again whole.

    While the store is gone, changes wait, the latest for each block, up to `max_backlog` blocks; then the oldest
    are dropped and counted. A dropped removal leaves a claim that a fetch will find untrue, never a wrong block.

    Use from the event loop's thread. `start()` also declares the incarnation, so that what an earlier process of
    this name published is dead before this one has sealed a block.
    """

    def __init__(
        self,
        client: IndexWriter,
        worker: WorkerIdentity,
        *,
        tier: Tier = Tier.DEVICE,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        max_batch: int = MAX_BATCH,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        """Does not own the client; the store takes at most 65,536 hashes a call."""
        self._client = client
        self._worker = worker
        self._tier = tier
        self._flush_interval_s = flush_interval_s
        self._max_batch = max_batch
        self._max_backlog = max_backlog
        self._pending: dict[bytes, bool] = {}  # hash -> held now; oldest first
        self._declared = False
        self._available = True
        self._wake = asyncio.Event()  # something is to be sent, or closing
        self._full = asyncio.Event()  # a whole batch waits, or closing
        self._closing = asyncio.Event()
        self._last_refusal = ""
        self._task: asyncio.Task[None] | None = None
        self.num_published = 0
        """Blocks that the store was told of."""
        self.num_removed = 0
        """Blocks that the store was told to forget."""
        self.num_dropped = 0
        """Changes that never reached the store: backlog full, refused, or closed before."""
        self.num_outages = 0
        """How often the store stopped to answer."""

    @property
    def available(self) -> bool:
        """False from the first failed call to the next that works."""
        return self._available

    @property
    def num_pending(self) -> int:
        """Blocks whose change waits."""
        return len(self._pending)

    async def start(self) -> None:
        """Begins to send, the declaration first; does not wait for the store."""
        if self._task is None:
            self._wake.set()
            self._task = asyncio.create_task(self._run(), name="index publisher")

    def offer(self, sealed: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Changes of the pool since the last offer; returns at once. A hash in both counts as held."""
        if self._closing.is_set():
            return
        for held, hashes in ((False, evicted), (True, sealed)):
            for block_hash in hashes:
                self._pending.pop(block_hash, None)
                self._pending[block_hash] = held
        self._trim()
        if self._pending:
            self._wake.set()
        if len(self._pending) >= self._max_batch:
            self._full.set()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Takes no more, sends what waits for at most `deadline_s` seconds, drops the rest; twice is fine."""
        for event in (self._closing, self._wake, self._full):
            event.set()
        if self._task is not None:
            task, self._task = self._task, None
            await asyncio.wait({task}, timeout=deadline_s)
            await end_task(task)
        if self._pending:
            logger.warning("%d changes of the pool never reached the KV store", len(self._pending))
            self.num_dropped += len(self._pending)
            self._pending.clear()

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            await self._wake.wait()
            if self._declared:
                await _wait(self._full, self._flush_interval_s)
            if await self._send_batch():
                retry_s = FIRST_RETRY_S
            else:
                await _wait(self._closing, retry_s)
                if self._closing.is_set():
                    await asyncio.sleep(FIRST_RETRY_S)  # until close()'s deadline cancels us
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            if self._pending or not self._declared:
                continue
            if self._closing.is_set():
                return
            self._wake.clear()
            self._full.clear()

    async def _send_batch(self) -> bool:
        """Sends the oldest changes; False when the store is gone, and they wait again."""
        batch = dict(islice(self._pending.items(), self._max_batch))
        for block_hash in batch:
            del self._pending[block_hash]
        held = [block_hash for block_hash, is_held in batch.items() if is_held]
        gone = [block_hash for block_hash, is_held in batch.items() if not is_held]
        try:
            if held or not self._declared:
                await self._client.publish(self._worker, held, self._tier)
                self._declared = True
            if gone:
                await self._client.remove(self._worker, gone, self._tier)
        except StoreUnavailable as error:
            self._put_back(batch)
            self._went(error)
            return False
        except asyncio.CancelledError:
            self._put_back(batch)
            raise
        except TandemError as error:
            self._came_back()
            self._refused(error, len(batch))
            return True
        self._came_back()
        self.num_published += len(held)
        self.num_removed += len(gone)
        return True

    def _put_back(self, batch: dict[bytes, bool]) -> None:
        """Before everything newer, which has the last word on a hash that is in both."""
        self._pending = {**batch, **self._pending}
        self._trim()

    def _trim(self) -> None:
        excess = len(self._pending) - self._max_backlog
        if excess > 0:
            for block_hash in list(islice(self._pending, excess)):
                del self._pending[block_hash]
            self.num_dropped += excess

    def _went(self, error: StoreUnavailable) -> None:
        if self._available:
            logger.warning("the index is not told of this worker's blocks for now: %s", error)
            self._available = False
            self.num_outages += 1

    def _came_back(self) -> None:
        if not self._available:
            logger.info("the KV store answers again; %d blocks' changes wait", len(self._pending))
            self._available = True

    def _refused(self, error: TandemError, num_changes: int) -> None:
        """Sending it again would be refused again: a superseded incarnation, or a bug."""
        self._declared = True
        self.num_dropped += num_changes
        if error.message != self._last_refusal:
            logger.error("the KV store refuses this worker's blocks: %s", error)
            self._last_refusal = error.message


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
