"""Publishes to the index which blocks a worker's pool holds, in the background: the engine never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from shared.errors import StoreUnavailable, TandemError
from shared.identity import WorkerIdentity
from shared.kv_index.holders import EventStamp, Tier
from shared.tasks import end_task

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.02
HEARTBEAT_S = 2.0
MAX_BATCH = 4096
MAX_BACKLOG = 262_144
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0


class IndexWriter(Protocol):
    """The part of KVStoreClient that the publisher needs. Both methods return False when the index has lost earlier
    changes."""

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = ..., stamp: EventStamp = ...
    ) -> bool:
        """Declares that the worker holds these blocks."""

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = ..., stamp: EventStamp = ...
    ) -> bool:
        """Declares that the worker no longer holds these blocks."""


class IndexPublisher:
    """Sends changes in batches: 20 ms after the first, or at once when 4096 wait. One batch is in flight at a time.

    It keeps the set of hashes in the pool, built from the offered changes, and the hashes whose state the index does
    not know yet. So order does not matter: a batch states each hash's state at the time of sending, and a batch that
    failed half-way is sent again with the state of that later time. The set is kept here, not read from the pool: the
    pool's changes come in batches, so its content at another moment would differ from the sum of the changes so far.

    Every call has a sequence number and names the last one that was answered. An index that does not know that number
    has lost changes (Redis was restarted empty, or a replica took over without the last writes). Then the publisher
    resyncs: it sends everything again. An idle publisher notices too: it sends a heartbeat every 2 s, which also keeps
    the index from expiring this holder. It also resyncs when more than `max_backlog` changes wait, and more than blocks
    are held.

    Use it from the event loop's thread, one publisher for each (worker, tier). `start()` declares the incarnation at
    once, so that the entries of an earlier process of this name are dead before this one has sealed a block.
    """

    def __init__(
        self,
        client: IndexWriter,
        worker: WorkerIdentity,
        *,
        tier: Tier = Tier.DEVICE,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        heartbeat_s: float = HEARTBEAT_S,
        max_batch: int = MAX_BATCH,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        """Does not own the client. `max_batch`: the store accepts at most 65,536 hashes a call."""
        self._client = client
        self._worker = worker
        self._tier = tier
        self._flush_interval_s = flush_interval_s
        self._heartbeat_s = heartbeat_s
        self._max_batch = max_batch
        self._max_backlog = max_backlog
        self._held: dict[bytes, None] = {}  # in the order in which they were sealed
        self._changed: dict[bytes, None] = {}  # sealed or evicted, not acknowledged by the index; oldest first
        self._resyncing = True
        self._sequence = 0  # number of the last call
        self._acknowledged = 0
        self._available = True
        self._wake = asyncio.Event()  # there is something to send, or closing
        self._full = asyncio.Event()  # a whole batch waits, or closing
        self._closing = asyncio.Event()
        self._last_refusal = ""
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Changes that the store refused, or that were not sent before `close`."""
        self.num_resyncs = 0
        """Number of times that everything was published again because the index had lost changes."""

    @property
    def available(self) -> bool:
        """False from a failed call to the next successful one."""
        return self._available

    @property
    def num_pending(self) -> int:
        """Changes that wait to be sent."""
        return len(self._held) if self._resyncing else len(self._changed)

    async def start(self) -> None:
        """Starts sending, the incarnation first; does not wait for the store."""
        if self._task is None:
            self._wake.set()
            self._task = asyncio.create_task(self._run(), name="index publisher")

    def offer(self, sealed: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Takes the pool's changes since the last call; returns at once. A hash in both counts as held."""
        if self._closing.is_set():
            return
        for block_hash in evicted:
            self._held.pop(block_hash, None)
            self._changed[block_hash] = None
        for block_hash in sealed:
            self._held[block_hash] = None
            self._changed[block_hash] = None
        # What begins a resync may be on its way, and what is behind it waits here.
        if len(self._changed) > max(self._max_backlog, len(self._held)) and not self._resyncing:
            self._resync()
        if self._changed:
            self._wake.set()
        if len(self._changed) >= self._max_batch:
            self._full.set()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Takes no more changes, sends the waiting ones for at most `deadline_s` seconds, drops the rest.
        Idempotent."""
        for event in (self._closing, self._wake, self._full):
            event.set()
        if self._task is not None:
            task, self._task = self._task, None
            await asyncio.wait({task}, timeout=deadline_s)
            await end_task(task)
            if self.num_pending:
                logger.warning("%d changes of the pool never reached the KV store", self.num_pending)
                self.num_dropped += self.num_pending
            self._changed.clear()
            self._held.clear()

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            await _wait(self._wake, self._heartbeat_s)
            if not self._resyncing:
                await _wait(self._full, self._flush_interval_s)
            if await self._send_batch():
                retry_s = FIRST_RETRY_S
            else:
                await _wait(self._closing, retry_s)
                if self._closing.is_set():
                    await asyncio.sleep(FIRST_RETRY_S)  # until the deadline of close() cancels this task
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            if self._changed or self._resyncing:
                self._wake.set()
            elif self._closing.is_set():
                return
            else:
                self._wake.clear()
                self._full.clear()

    def _resync(self) -> None:
        self._resyncing = True
        self._changed.clear()
        self._wake.set()

    async def _send_batch(self) -> bool:
        """Sends the oldest changes; False if the store did not answer; then they wait again."""
        if self._resyncing:
            self._changed = dict(self._held)
        batch = list(islice(self._changed, self._max_batch))
        for block_hash in batch:
            del self._changed[block_hash]
        if self._closing.is_set() and not batch and not self._resyncing:
            return True
        held = [block_hash for block_hash in batch if block_hash in self._held]
        gone = [block_hash for block_hash in batch if block_hash not in self._held]
        try:
            whole = await self._send(held, gone)
        except StoreUnavailable as error:
            self._put_back(batch)
            self._on_outage(error)
            return False
        except asyncio.CancelledError:
            self._put_back(batch)
            raise
        except TandemError as error:
            self._on_answer()
            self._on_refusal(error, len(batch))
            return True
        self._on_answer()
        if not whole:
            logger.warning("the index has lost blocks of this worker: publishing all %d again", len(self._held))
            self.num_resyncs += 1
            self._resync()
            return True
        return True

    async def _send(self, held: list[bytes], gone: list[bytes]) -> bool:
        """False when the index has lost earlier changes. Without changes it is a heartbeat."""
        if held or not gone:
            stamp = self._next_stamp()
            if not await self._client.publish(self._worker, held, self._tier, stamp):
                return False
            self._acknowledged = stamp.sequence
            self._resyncing = self._resyncing and not stamp.reset
        if gone:
            stamp = self._next_stamp()
            if not await self._client.remove(self._worker, gone, self._tier, stamp):
                return False
            self._acknowledged = stamp.sequence
        return True

    def _next_stamp(self) -> EventStamp:
        self._sequence += 1
        return EventStamp(self._sequence, self._acknowledged, self._resyncing)

    def _put_back(self, batch: list[bytes]) -> None:
        """Queues the batch again, before all newer changes."""
        self._changed = {**dict.fromkeys(batch), **self._changed}

    def _on_outage(self, error: StoreUnavailable) -> None:
        if self._available:
            logger.warning("this worker's blocks are not published for now: %s", error)
            self._available = False

    def _on_answer(self) -> None:
        if not self._available:
            logger.info("the KV store answers again; %d changes wait", self.num_pending)
            self._available = True

    def _on_refusal(self, error: TandemError, num_changes: int) -> None:
        """Drops the changes, because a retry would be refused too: the incarnation is superseded, or there is a bug."""
        self._resyncing = False
        self.num_dropped += num_changes
        if error.message != self._last_refusal:
            logger.error("the KV store refuses this worker's blocks: %s", error)
            self._last_refusal = error.message


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
