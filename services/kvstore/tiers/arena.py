"""Blocks in host memory: one array of equal slots, allocated once, so that it can be registered for transfers once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.kvstore.tiers.accounts import Quotas
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.lru import BlockLru, check_budget, check_quotas
from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.tier import TierCounters, TierEvents
from shared.errors import StoreUnavailable
from shared.kv_index.holders import Tier


class HostArena:
    """`BlockTier` of blocks of one size. `start()` allocates; the system provides pages as slots are first written."""

    tier = Tier.HOST
    overhead_bytes = 0

    def __init__(
        self, budget_bytes: int, block_bytes: int, quotas: Quotas | None = None, pin_share: float = 0.0
    ) -> None:
        """Holds `budget_bytes // block_bytes` blocks, at most `pin_share` of them pinned. Raises ConfigError (field
        host_bytes, or the tenant's quota) when that is 0."""
        check_budget("host_bytes", budget_bytes, block_bytes)
        self.counters = TierCounters()
        self._block_bytes = block_bytes
        self._num_slots = budget_bytes // block_bytes
        limits = quotas or Quotas()
        check_quotas("host_bytes", limits, block_bytes)
        self.blocks = BlockLru(self._num_slots * block_bytes, limits, int(pin_share * budget_bytes))
        self._slots: NDArray[np.uint8] | None = None  # [num_slots, block_bytes]
        self._free: list[int] = []
        self._places: dict[bytes, tuple[int, int]] = {}  # hash -> slot, checksum

    def start(self) -> None:
        """Allocates the memory. Raises StoreUnavailable when the system has none."""
        if self._slots is None:
            try:
                self._slots = np.empty((self._num_slots, self._block_bytes), np.uint8)
            except MemoryError as error:
                raise StoreUnavailable(f"no {self.blocks.budget_bytes} bytes of host memory", tier="host") from error
            self._free = list(range(self._num_slots - 1, -1, -1))

    def close(self) -> None:
        """See BlockTier; all blocks are lost."""
        self._slots = None
        self._places.clear()
        for block_hash in self.blocks.hashes():
            self.blocks.drop(block_hash)

    def holds(self, block_hash: bytes) -> bool:
        """See BlockTier."""
        return block_hash in self.blocks

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN) -> bool:
        """See BlockTier."""
        wanted = num_bytes == self._block_bytes and self.blocks.wants(block_hash, num_bytes, tenant, keep)
        self.counters.num_refused += not wanted and block_hash not in self.blocks
        return wanted

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tenant: str = "", keep: Keep = PLAIN) -> None:
        """See BlockTier."""
        if block_hash in self.blocks:
            self.blocks.use(block_hash, keep)
            return
        if block.nbytes != self._block_bytes or block_checksum(block) != checksum:
            raise ValueError(f"no block of {self._block_bytes} bytes with checksum {checksum:016x}")
        if not self.blocks.can_fit(self._block_bytes, tenant):
            self.counters.num_refused += 1
            return
        for victim in self.blocks.victims(self._block_bytes, tenant):
            self._free_slot(victim)
            self.blocks.evict(victim)
            self.counters.num_evicted += 1
        slot = self._free.pop()
        self._bytes(slot)[:] = np.frombuffer(block, np.uint8)
        self._places[block_hash] = slot, checksum
        self.blocks.add(block_hash, self._block_bytes, tenant, keep)
        self.counters.num_stored += 1

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """See BlockTier."""
        place = self._places.get(block_hash)
        if place is None:
            self.counters.num_misses += 1
            return None
        if into.nbytes != self._block_bytes:
            raise ValueError(f"the block has {self._block_bytes} bytes, not {into.nbytes}")
        slot, checksum = place
        np.frombuffer(into, np.uint8)[:] = self._bytes(slot)
        if block_checksum(into) != checksum:
            self.counters.num_bad += 1
            self.drop(block_hash)
            return None
        self.blocks.hit(block_hash)
        self.counters.num_hits += 1
        return checksum

    def whose(self, block_hash: bytes) -> tuple[str, Keep]:
        """See BlockTier."""
        return self.blocks.tenant_of(block_hash), self.blocks.keep_of(block_hash)

    def drop(self, block_hash: bytes) -> None:
        """See BlockTier."""
        if block_hash in self.blocks:
            self._free_slot(block_hash)
            self.blocks.drop(block_hash)

    def drain_events(self) -> TierEvents:
        """See BlockTier."""
        return TierEvents(*self.blocks.drain())

    def _bytes(self, slot: int) -> NDArray[np.uint8]:
        if self._slots is None:
            raise StoreUnavailable("the host memory tier is not started", tier="host")
        row: NDArray[np.uint8] = self._slots[slot]
        return row

    def _free_slot(self, block_hash: bytes) -> None:
        slot, _ = self._places.pop(block_hash)
        self._free.append(slot)
