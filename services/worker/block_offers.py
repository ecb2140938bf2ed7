"""Gives the store what sequences left behind, behind the engine's back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

from services.worker.host import EngineHost
from services.worker.store_answers import StoreAnswers
from shared.engine.messages import ReleaseHeld
from shared.errors import ConfigError, InvalidRequest, ModelMismatch, TandemError
from shared.rpc.shipment import Shipment
from shared.rpc.store_client import StoreClient

logger = logging.getLogger(__name__)

BATCH = 64
"""Blocks offered, and so held for the sender, at once."""
MAX_WAITING = 256
"""Sequences whose blocks wait to be offered; more, and the oldest are dropped."""
RETRY_S = 1.0
SEND_TIMEOUT_S = 10.0


class BlockOffers:
    """Offers blocks batch by batch, one batch on its way at a time. A store that is gone costs a line in the log, and
    the blocks of the sequences that end meanwhile."""

    def __init__(self, host: EngineHost, client: StoreClient, answers: StoreAnswers) -> None:
        """Owns none of them."""
        self._host = host
        self._client = client
        self._answers = answers
        self._waiting: deque[tuple[bytes, ...]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._available = True
        self._task: asyncio.Task[None] | None = None
        self.num_sent = 0
        """Blocks that the store took."""
        self.num_dropped = 0
        """Sequences whose blocks were not offered."""

    def start(self) -> None:
        """Begins to offer."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="block offers")

    def add(self, hashes: tuple[bytes, ...]) -> None:
        """A sequence's sealed blocks; returns at once."""
        if self._closing:
            return
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.num_dropped += 1
        self._waiting.append(hashes)
        self._wake.set()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Takes no more, offers what waits for at most `deadline_s` seconds; twice is fine."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            task, self._task = self._task, None
            await asyncio.wait({task}, timeout=deadline_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            while self._waiting:
                hashes = self._waiting.popleft()
                try:
                    for start in range(0, len(hashes), BATCH):
                        await self._offer(hashes[start : start + BATCH])
                except (ModelMismatch, ConfigError, InvalidRequest) as error:
                    logger.error("the store at %s cannot take this worker's blocks: %s", self._client.address, error)
                    self._closing = True
                    self._waiting.clear()
                except TandemError as error:
                    await self._back_off(error)
            if self._closing:
                return
            self._wake.clear()

    async def _offer(self, hashes: tuple[bytes, ...]) -> None:
        """Raises TandemError where the store is gone or refuses."""
        settings = self._host.settings
        wanted = await self._client.offer(settings.name, hashes, self._host.model.layout.block_bytes)
        if not self._available:
            logger.info("the store at %s takes blocks again", self._client.address)
            self._available = True
        if not wanted.indexes:
            return
        shipment = Shipment(
            self._host.transfer,
            wanted.transfer_address,
            wanted.ticket,
            len(wanted.indexes),
            self._host.engine.blocks.outgoing,
            lambda block: self._host.engine.submit(ReleaseHeld((block.block_id,))),
            SEND_TIMEOUT_S,
        )
        held = await self._answers.hold(tuple(hashes[index] for index in wanted.indexes))
        for block in held.blocks:
            shipment.add(block)
        await shipment.finish(0, 0, finished=False)
        self.num_sent += shipment.num_blocks

    async def _back_off(self, error: TandemError) -> None:
        if self._available:
            logger.warning("the store at %s takes no blocks for now: %s", self._client.address, error)
            self._available = False
        self.num_dropped += 1 + len(self._waiting)
        self._waiting.clear()
        if not self._closing:
            await asyncio.sleep(RETRY_S)
