"""What a tier of blocks is, whatever it keeps them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.rpc.block_holders import Tier


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
    """Not admitted: offered for the first time while the tier was full."""
    num_bad: int = 0
    """Blocks that were not what their checksum said: dropped, to be computed again."""


class BlockTier(Protocol):
    """Blocks by their hash, within a budget; least recently used goes first.

    Not thread-safe: one thread owns it, and calls may block on the disk. An error of the system, a full or a read-only
    disk, is a StoreUnavailable that leaves the tier as it was; it is never a miss.
    """

    tier: Tier
    counters: TierCounters

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""

    @property
    def budget_bytes(self) -> int:
        """Most of them."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether it is here, as far as is known without reading it; changes nothing."""

    def wants(self, block_hash: bytes, num_bytes: int) -> bool:
        """Whether to bring this block here, asked before its bytes travel. Notes that it was offered: while the tier is
        full, only a block that is offered again is worth another one's place. One that is here counts as used."""

    def put(self, block_hash: bytes, block: memoryview, checksum: int) -> None:
        """Keeps a copy; evicts what must go. A block that is here is kept as it is, and counts as used.

        Raises ValueError when the block can never fit or the checksum is not its own: that is for the caller to check.
        """

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """Copies the block to `into`, which has its size, and returns its checksum, computed over what was copied.

        None when it is not here, or was and is damaged: then it is dropped and counted. Raises ValueError, and drops
        nothing, when `into` has another size.
        """

    def drain_events(self) -> TierEvents:
        """Changes for the index since the last call; after a restart of a tier that keeps, all it kept."""

    def close(self) -> None:
        """Frees memory and locks; twice is fine."""
