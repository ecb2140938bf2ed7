"""The order in which blocks are evicted: those of low priority or whose time is over, the others, those retained."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import chain
from typing import NamedTuple


class Keep(NamedTuple):
    """How long a block is wanted."""

    retain_s: float = 0.0  # after each use; 0: as others
    is_low: bool = False  # of requests that give way, such as batches: evicted before others

    def joined(self, other: Keep) -> Keep:
        """What both ask for: the longer time, and low priority only where both have it."""
        return Keep(max(self.retain_s, other.retain_s), self.is_low and other.is_low)


PLAIN = Keep()


class Rank(IntEnum):
    """Blocks of a lower rank are evicted first."""

    LOW = 0
    PLAIN = 1
    RETAINED = 2


class EvictionOrder:
    """Hashes by rank, and the least recently used first within one."""

    def __init__(self) -> None:
        self._ranks: tuple[dict[bytes, None], ...] = tuple({} for _ in Rank)

    def __contains__(self, block_hash: bytes) -> bool:
        return self.rank_of(block_hash) is not None

    def __iter__(self) -> Iterator[bytes]:
        """The next to be evicted first."""
        return chain(*self._ranks)

    def of(self, rank: Rank) -> Iterator[bytes]:
        """The blocks of one rank, the least recently used first."""
        return iter(self._ranks[rank])

    def rank_of(self, block_hash: bytes) -> Rank | None:
        """The block's rank; None for a block that is not in this order."""
        return next((rank for rank in Rank if block_hash in self._ranks[rank]), None)

    def push(self, block_hash: bytes, rank: Rank) -> None:
        """Adds one that is not here, as the most recently used of its rank."""
        self._ranks[rank][block_hash] = None

    def remove(self, block_hash: bytes) -> Rank | None:
        """Removes a block; returns its rank, or None where it was not in the order."""
        rank = self.rank_of(block_hash)
        if rank is not None:
            del self._ranks[rank][block_hash]
        return rank
