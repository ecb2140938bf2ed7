"""Which blocks of a tier may not be evicted: named lists of hashes within a budget, for blocks held or not. Policy
only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Named:
    block_hashes: tuple[bytes, ...]
    num_bytes: int  # of each
    tenant: str


class PinSet:
    """Pins of one tier. A block in several pins counts once, with the size in its first pin."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Bytes of the pinned blocks, held or not."""
        self._named: dict[str, _Named] = {}
        self._counts: Counter[bytes] = Counter()
        self._sizes: dict[bytes, int] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a pin names the block."""
        return block_hash in self._counts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pins, oldest first."""
        return tuple(self._named)

    def hashes(self, name: str) -> tuple[bytes, ...]:
        """A pin's blocks; empty if there is no such pin."""
        return self._named[name].block_hashes if name in self._named else ()

    def fits(self, block_hashes: Sequence[bytes], num_bytes: int, tenant: str, quota: int) -> bool:
        """Whether another pin of these blocks fits the budget, and the tenant's pins its quota (0 = none)."""
        new_bytes = num_bytes * len({name for name in block_hashes if name not in self._counts})
        own = [pin for pin in self._named.values() if pin.tenant == tenant]
        own_hashes = {block_hash: pin.num_bytes for pin in own for block_hash in pin.block_hashes}
        own_hashes |= dict.fromkeys(block_hashes, num_bytes)
        return self.used_bytes + new_bytes <= self.budget_bytes and (not quota or sum(own_hashes.values()) <= quota)

    def add(self, name: str, block_hashes: Sequence[bytes], num_bytes: int, tenant: str) -> None:
        """Another pin; its name must be free."""
        assert name not in self._named, name
        unique = tuple(dict.fromkeys(block_hashes))
        self._named[name] = _Named(unique, num_bytes, tenant)
        for block_hash in unique:
            if block_hash not in self._counts:
                self._sizes[block_hash] = num_bytes
                self.used_bytes += num_bytes
            self._counts[block_hash] += 1

    def remove(self, name: str) -> None:
        """Ends a pin; unknown names are ignored."""
        pin = self._named.pop(name, None)
        for block_hash in pin.block_hashes if pin is not None else ():
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]
                self.used_bytes -= self._sizes.pop(block_hash)
