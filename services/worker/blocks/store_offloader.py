"""Offers the blocks of ended sequences to a store node, beside the running engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from services.worker.blocks.exchange_client import BlockExchangeClient
from services.worker.host import EngineHost
from shared.block_service.store_nodes import StoreNodes
from shared.engine.messages import ReleaseHeld
from shared.errors import ConfigError, InvalidRequest, ModelMismatch, TandemError
from shared.kv.handoff.shipment import Shipment
from shared.kv.seal import Purpose

BATCH = 64
"""Blocks offered, and so held for the sender, at once."""
MAX_WAITING = 256
"""Sequences whose blocks wait to be offered; more, and the oldest are dropped."""
SEND_TIMEOUT_S = 10.0


class StoreOffloader:
    """Offers blocks to one node, batch by batch, one batch on its way at a time. If the node does
    not answer, that is logged and the waiting blocks are dropped."""

    def __init__(self, host: EngineHost, name: str, nodes: StoreNodes, exchange: BlockExchangeClient) -> None:
        """`name` is the node's; owns nothing."""
        self._host = host
        self._name = name
        self._nodes = nodes
        self._exchange = exchange
        self._waiting: deque[tuple[tuple[bytes, ...], str]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_sent = 0
        """Blocks that the node took."""
        self.num_dropped = 0
        """Sequences whose blocks were not offered."""

    def start(self) -> None:
        """Begins to offer."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="block offers")

    def add(self, hashes: tuple[bytes, ...], tenant: str) -> None:
        """Sealed blocks that a sequence of this tenant left; returns at once."""
        if self._closing:
            return
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.num_dropped += 1
        self._waiting.append((hashes, tenant))
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
                hashes, tenant = self._waiting.popleft()
                try:
                    for start in range(0, len(hashes), BATCH):
                        await self._offer(hashes[start : start + BATCH], tenant)
                except (ModelMismatch, ConfigError, InvalidRequest) as error:
                    self._nodes.refused(self._name, error)
                    self._drop()
                except TandemError as error:
                    self._nodes.failed(self._name, error)
                    self._drop()
            if self._closing:
                return
            self._wake.clear()

    async def _offer(self, hashes: tuple[bytes, ...], tenant: str) -> None:
        """Raises TandemError where the node is gone or refuses."""
        client, worker_name = self._nodes.client(self._name), self._host.settings.name
        wanted = await client.offer(worker_name, hashes, self._host.model.layout.block_bytes, tenant)
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
            self._host.seal(Purpose.OFFER, wanted.ticket),
        )
        held = await self._exchange.hold(tuple(hashes[index] for index in wanted.indexes))
        shipment.add(*held.blocks)
        await shipment.finish(0, 0, finished=False)
        self.num_sent += shipment.num_blocks

    def _drop(self) -> None:
        self.num_dropped += 1 + len(self._waiting)
        self._waiting.clear()
