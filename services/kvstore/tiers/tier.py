"""The interface of a tier of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.kvstore.tiers.lru import BlockLru
from services.kvstore.tiers.order import Keep
from shared.kv_index.holders import Tier


@dataclass(frozen=True, slots=True)
class TierEvents:
    """Blocks that a tier has gained and lost since the last drain; net, like a block pool's events."""

    sealed: list[bytes]
    evicted: list[bytes]


@dataclass(slots=True)
class TierCounters:
    """Counts of a tier since its start."""

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    """Blocks not admitted: offered for the first time while the tier was full, or pinned blocks left no room."""
    num_bad: int = 0
    """Blocks that did not match their checksum: dropped, to be computed again."""


class BlockTier(Protocol):
    """Blocks by their hash, within a budget; the least recently used is evicted first.

    Not thread-safe: one thread owns it, and calls may block on the disk. A system error, such as a full or a read-only
    disk, raises StoreUnavailable and is never a miss. The tier is then as it was, but for blocks that were evicted for
    one that could not be written.
    """

    tier: Tier
    counters: TierCounters
    blocks: BlockLru
    """Which blocks are held, of which tenant, and which are pinned."""
    overhead_bytes: int
    """Bytes of the budget that a block takes beyond its own."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether the block is held, without reading it; changes nothing."""

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = ..., keep: Keep = ...) -> bool:
        """Whether to send this block here; called before its bytes are transferred. Records the offer: while the tier,
        or the tenant's share of it, is full, only a block that was offered before replaces another one. A held block
        counts as used. `keep`: how long it is wanted."""

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tenant: str = ..., keep: Keep = ...) -> None:
        """Stores a copy, evicting others where needed. A block that is held already is not changed and counts as used.
        One for which pins or the tenant's quota leave no room any more is refused and counted.

        Raises ValueError when the block does not match the size or the checksum.
        """

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """Copies the block to `into`, which has its size, and returns its checksum, computed over what was copied.

        None when the block is not held, or is damaged: then it is dropped and counted. Raises ValueError, and drops
        nothing, when `into` has another size.
        """

    def whose(self, block_hash: bytes) -> tuple[str, Keep]:
        """The tenant that a held block belongs to, and how long it is wanted."""

    def drop(self, block_hash: bytes) -> None:
        """Removes a block; one that is not held is ignored."""

    def drain_events(self) -> TierEvents:
        """Changes for the index since the last call. After a restart of a persistent tier: all blocks that it kept."""

    def close(self) -> None:
        """Frees memory and locks; idempotent."""
