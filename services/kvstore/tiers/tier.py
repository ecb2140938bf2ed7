"""What a tier of blocks is, whatever it keeps them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.kvstore.tiers.lru import BlockLru
from shared.kv_index.holders import Tier


@dataclass(frozen=True, slots=True)
class TierEvents:
    """What a tier holds since the last drain and did not before, and the other way round; net, as of a block pool."""

    sealed: list[bytes]
    evicted: list[bytes]


@dataclass(slots=True)
class TierCounters:
    """Since the start."""

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    """Not admitted: offered for the first time while the tier was full, or without room beside what is pinned."""
    num_bad: int = 0
    """Blocks that were not what their checksum said: dropped, to be computed again."""


class BlockTier(Protocol):
    """Blocks by their hash, within a budget; least recently used goes first.

    Not thread-safe: one thread owns it, and calls may block on the disk. An error of the system, a full or a read-only
    disk, is a StoreUnavailable that leaves the tier as it was; it is never a miss.
    """

    tier: Tier
    counters: TierCounters
    blocks: BlockLru
    """What is held, whose it is, and what may not be evicted."""
    overhead_bytes: int
    """What a block takes of the budget beyond its own bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""

    @property
    def budget_bytes(self) -> int:
        """Most of them."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether it is here, as far as is known without reading it; changes nothing."""

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = ...) -> bool:
        """Whether to bring this block here, asked before its bytes travel. Notes that it was offered: while the tier,
        or the tenant's part of it, is full, only a block that is offered again is worth another one's place. One that
        is here counts as used."""

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tenant: str = ...) -> None:
        """Keeps a copy; evicts what must go. A block that is here is kept as it is, and counts as used. One that has
        no room any more, since pins or the tenant's quota are in its way, is refused and counted.

        Raises ValueError when the size or the checksum is not the block's: that is for the caller to check.
        """

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """Copies the block to `into`, which has its size, and returns its checksum, computed over what was copied.

        None when it is not here, or was and is damaged: then it is dropped and counted. Raises ValueError, and drops
        nothing, when `into` has another size.
        """

    def drop(self, block_hash: bytes) -> None:
        """The block is here no more; one that is not here is ignored."""

    def drain_events(self) -> TierEvents:
        """Changes for the index since the last call; after a restart of a tier that keeps, all it kept."""

    def close(self) -> None:
        """Frees memory and locks; twice is fine."""
