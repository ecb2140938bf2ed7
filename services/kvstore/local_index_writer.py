"""Publishes the blocks of this process's store node to the index, without gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.kvstore.availability import Availability
from services.kvstore.index import BlockIndex, ResyncNeeded
from shared.errors import StoreUnavailable
from shared.identity import WorkerIdentity
from shared.kv_index.holders import EventStamp, Tier, join_hashes

_UNSTAMPED = EventStamp(sequence=0, acknowledged=0)


class LocalIndexWriter:
    """`IndexWriter` over an index in the same process."""

    def __init__(self, index: BlockIndex, availability: Availability) -> None:
        """Does not close its arguments."""
        self._index = index
        self._availability = availability

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.HOST, stamp: EventStamp = _UNSTAMPED
    ) -> bool:
        """See IndexWriter."""
        return await self._change(self._index.publish, worker, hashes, tier, stamp)

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.HOST, stamp: EventStamp = _UNSTAMPED
    ) -> bool:
        """See IndexWriter."""
        return await self._change(self._index.remove, worker, hashes, tier, stamp)

    async def _change(
        self,
        call: Callable[[WorkerIdentity, Tier, bytes, EventStamp], Awaitable[int]],
        worker: WorkerIdentity,
        hashes: Sequence[bytes],
        tier: Tier,
        stamp: EventStamp,
    ) -> bool:
        self._availability.require()
        try:
            await call(worker, tier, join_hashes(hashes), stamp)
        except ResyncNeeded:
            return False
        except StoreUnavailable:
            self._availability.suspect()
            raise
        return True
