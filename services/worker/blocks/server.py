"""Gives blocks of this worker's pool to other workers that ask for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from services.worker.blocks.exchange_client import BlockExchangeClient, LocalBlocks
from services.worker.host import EngineHost
from shared.block_service.client import SentBlock
from shared.engine.messages import ReleaseHeld
from shared.errors import InvalidRequest, ModelMismatch
from shared.kv.block_memory import BlockMemory
from shared.kv.handoff.outgoing_block import OutgoingBlock
from shared.kv.handoff.shipment import Shipment
from shared.kv.seal import Purpose
from shared.kv_index.holders import Tier

MAX_HELD = 64
"""Most blocks held for senders at once, over all requests …"""
MAX_HELD_SHARE = 0.25
"""… and at most this share of the pool."""
PART = 8
"""Blocks announced in one message, so that the receiver takes in the first while the others travel."""
SEND_TIMEOUT_S = 10.0
"""A receiver that takes nothing for this long is given up."""


class BlockServer:
    """Implements `BlockProvider`. A block that is being sent has a reference of its own and cannot be evicted; their
    number is bounded, and later requests wait."""

    def __init__(self, host: EngineHost, exchange: BlockExchangeClient, local: LocalBlocks) -> None:
        """Owns none of them. The host must be started."""
        self._host = host
        self._exchange = exchange
        self._local = local
        self._num_free = max(1, min(MAX_HELD, int(MAX_HELD_SHARE * host.model.num_blocks)))
        self._given_back = asyncio.Event()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_given = 0
        """Blocks sent to other workers."""

    async def look_up(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `BlockProvider`."""
        return [name in self._local for name in hashes]

    async def fetch(
        self, hashes: Sequence[bytes], block_bytes: int, ticket: int, address: bytes
    ) -> AsyncGenerator[list[SentBlock], None]:
        """See `BlockProvider`."""
        ours = self._host.model.layout.block_bytes
        if block_bytes != ours:
            raise ModelMismatch(
                f"this worker's blocks have {ours} bytes, those asked for {block_bytes}",
                field="block_bytes",
                limit=ours,
            )
        shipment = Shipment(
            self._host.transfer, address, ticket, len(hashes), self.memory, self._release, SEND_TIMEOUT_S,
            self._host.seal(Purpose.FETCH, ticket),
        )  # fmt: skip
        with self._active():
            async with shipment:
                left = list(range(len(hashes)))
                while left:
                    count = await self._take(len(left))
                    batch, left = left[-count:][::-1], left[:-count]
                    blocks = await self._hold(batch, hashes)
                    self.num_given += len(blocks)
                    parts = [blocks[begin : begin + PART] for begin in range(0, len(blocks), PART)]
                    leaving = [(part, shipment.add(*part)) for part in parts]
                    for part, tags in leaving:
                        yield [
                            SentBlock(block.index, block.checksum, Tier.DEVICE, tag)
                            for block, tag in zip(part, await tags, strict=True)
                        ]
                await shipment.finish(0, 0, finished=False)

    async def flush(self, tenant: str | None) -> tuple[int, int]:
        """See `BlockProvider`; raises InvalidRequest for one tenant's."""
        if tenant is not None:
            raise InvalidRequest("a worker's pool does not know whose its blocks are", field="tenant")
        num_blocks = await self._exchange.flush()
        return num_blocks, num_blocks * self._host.model.layout.block_bytes

    def memory(self, block_id: int) -> BlockMemory:
        """A held block's bytes."""
        return self._host.engine.blocks.outgoing(block_id)

    async def close(self, deadline_s: float = 1.0) -> None:
        """Waits for what is being sent, for at most `deadline_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """While something is being sent."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def _hold(self, batch: list[int], hashes: Sequence[bytes]) -> list[OutgoingBlock]:
        """Those of the blocks that are still here, each with a reference for the shipment, which also ends what was
        taken for it."""
        asking = asyncio.create_task(self._exchange.hold(tuple(hashes[index] for index in batch)))
        try:
            held = await asyncio.shield(asking)
        except asyncio.CancelledError:
            held = await asking
            self._host.engine.submit(ReleaseHeld(tuple(block.block_id for block in held.blocks)))
            self._give_back(len(batch))
            raise
        self._give_back(len(batch) - len(held.blocks))
        return [OutgoingBlock("", batch[block.index], block.block_id, block.checksum) for block in held.blocks]

    async def _take(self, most: int) -> int:
        """Reserves room to hold blocks: at least one, at most `most`. Waits while there is none."""
        while not self._num_free:
            self._given_back.clear()
            await self._given_back.wait()
        count = min(most, self._num_free)
        self._num_free -= count
        return count

    def _give_back(self, count: int) -> None:
        self._num_free += count
        self._given_back.set()

    def _release(self, block: OutgoingBlock) -> None:
        self._host.engine.submit(ReleaseHeld((block.block_id,)))
        self._give_back(1)
