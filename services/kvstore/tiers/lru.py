"""Which blocks stay within a budget. Policy only: no bytes are held here.

Least recently used goes first, with admission on second use: while everything fits, everything is taken; once the
budget is spent, a block must be offered twice within the memory of recent offers to be worth another one's place. So
prompts that nobody repeats pass by without flushing those that many share (the one-hit wonders of Maggs, Sitaraman,
"Algorithmic nuggets in content delivery", 2015).
"""

from __future__ import annotations

from shared.errors import ConfigError

OFFERS_PER_BLOCK = 4
MIN_OFFERS = 1024
"""Offers remembered: this many for each block held, at least so many."""


class BlockLru:
    """Hashes and their sizes, the least recently used first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: dict[bytes, int] = {}  # least recently used first
        self._offered: dict[bytes, None] = {}  # not held, oldest offer first
        self._sealed: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._sizes)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether it is held; changes nothing."""
        return block_hash in self._sizes

    def hashes(self) -> list[bytes]:
        """All, least recently used first."""
        return list(self._sizes)

    def wants(self, block_hash: bytes, num_bytes: int) -> bool:
        """Whether the block should be brought; notes the offer. False for one that can never fit, or is held: that one
        counts as used."""
        if block_hash in self._sizes:
            self.use(block_hash)
            return False
        if num_bytes > self.budget_bytes:
            return False
        again = self._offered.pop(block_hash, self) is None
        self._offered[block_hash] = None
        while len(self._offered) > max(MIN_OFFERS, OFFERS_PER_BLOCK * len(self._sizes)):
            del self._offered[next(iter(self._offered))]
        return again or self.used_bytes + num_bytes <= self.budget_bytes

    def use(self, block_hash: bytes) -> None:
        """A held block was read."""
        self._sizes[block_hash] = self._sizes.pop(block_hash)

    def victims(self, num_bytes: int) -> list[bytes]:
        """Who must go before `num_bytes` fit; changes nothing. Raises ValueError when that never fits."""
        if num_bytes > self.budget_bytes:
            raise ValueError(f"a block of {num_bytes} bytes never fits into {self.budget_bytes}")
        excess = self.used_bytes + num_bytes - self.budget_bytes
        found: list[bytes] = []
        for block_hash, size in self._sizes.items():
            if excess <= 0:
                break
            found.append(block_hash)
            excess -= size
        return found

    def add(self, block_hash: bytes, num_bytes: int) -> None:
        """The block is held now, as the most recently used. Raises ValueError unless it fits."""
        if block_hash in self._sizes or self.used_bytes + num_bytes > self.budget_bytes:
            raise ValueError("the block is held already, or does not fit")
        self._sizes[block_hash] = num_bytes
        self.used_bytes += num_bytes
        self._offered.pop(block_hash, None)
        if self._evicted.pop(block_hash, self) is not None:
            self._sealed[block_hash] = None

    def drop(self, block_hash: bytes) -> None:
        """The block is held no more."""
        self.used_bytes -= self._sizes.pop(block_hash)
        if self._sealed.pop(block_hash, self) is not None:
            self._evicted[block_hash] = None

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes that came and that went since the last call, net."""
        sealed, evicted = list(self._sealed), list(self._evicted)
        self._sealed, self._evicted = {}, {}
        return sealed, evicted


def check_budget(field: str, budget_bytes: int, block_bytes: int) -> None:
    """Raises ConfigError when not even one block fits."""
    if budget_bytes < block_bytes:
        raise ConfigError(
            f"{field} is {budget_bytes} bytes, one block takes {block_bytes}", field=field, limit=block_bytes
        )
