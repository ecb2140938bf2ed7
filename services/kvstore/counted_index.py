"""A block index that counts its calls and their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvstore.index import BlockIndex, IndexStats, ResyncNeeded
from shared.identity import WorkerIdentity
from shared.kv.hashing import HASH_BYTES
from shared.kv_index.holders import EventStamp, PrefixMatch, Tier

_UNSTAMPED = EventStamp(sequence=0, acknowledged=0)


@dataclass(slots=True)
class IndexCounters:
    """Sums since start, of calls that the index answered."""

    num_matches: int = 0
    num_match_blocks: int = 0
    num_hit_blocks: int = 0
    num_published_blocks: int = 0
    num_removed_blocks: int = 0
    num_resyncs: int = 0


class CountedIndex:
    """`BlockIndex` over another one, which it owns."""

    def __init__(self, index: BlockIndex) -> None:
        self.counters = IndexCounters()
        self._index = index

    async def start(self) -> None:
        """See BlockIndex."""
        await self._index.start()

    async def match(self, hashes: bytes) -> PrefixMatch:
        """See BlockIndex."""
        match = await self._index.match(hashes)
        self.counters.num_matches += 1
        self.counters.num_match_blocks += len(hashes) // HASH_BYTES
        self.counters.num_hit_blocks += match.num_blocks
        return match

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = _UNSTAMPED) -> int:
        """See BlockIndex."""
        try:
            num_blocks = await self._index.publish(worker, tier, hashes, stamp)
        except ResyncNeeded:
            self.counters.num_resyncs += 1
            raise
        self.counters.num_published_blocks += num_blocks
        return num_blocks

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = _UNSTAMPED) -> int:
        """See BlockIndex."""
        try:
            num_blocks = await self._index.remove(worker, tier, hashes, stamp)
        except ResyncNeeded:
            self.counters.num_resyncs += 1
            raise
        self.counters.num_removed_blocks += num_blocks
        return num_blocks

    async def forget_all(self) -> int:
        """See BlockIndex."""
        return await self._index.forget_all()

    async def stats(self) -> IndexStats:
        """See BlockIndex."""
        return await self._index.stats()

    async def probe(self) -> None:
        """See BlockIndex."""
        await self._index.probe()

    async def close(self) -> None:
        """See BlockIndex."""
        await self._index.close()
