"""Blocks in host memory: one array of equal slots, allocated once, so that it can be registered for transfers once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.lru import BlockLru, check_budget
from services.kvstore.tiers.tier import TierCounters, TierEvents
from shared.errors import StoreUnavailable
from shared.rpc.block_holders import Tier


class HostArena:
    """`BlockTier` of blocks of one size. Memory is taken by `start()`, page by page as slots are first written."""

    tier = Tier.HOST

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        """Holds `budget_bytes // block_bytes` blocks. Raises ConfigError (field host_bytes) when that is none."""
        check_budget("host_bytes", budget_bytes, block_bytes)
        self.counters = TierCounters()
        self._block_bytes = block_bytes
        self._num_slots = budget_bytes // block_bytes
        self._lru = BlockLru(self._num_slots * block_bytes)
        self._slots: NDArray[np.uint8] | None = None  # [num_slots, block_bytes]
        self._free: list[int] = []
        self._places: dict[bytes, tuple[int, int]] = {}  # hash -> slot, checksum

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""
        return self._lru.used_bytes

    @property
    def budget_bytes(self) -> int:
        """Most of them."""
        return self._lru.budget_bytes

    def start(self) -> None:
        """Takes the memory. Raises StoreUnavailable when the system has none."""
        if self._slots is None:
            try:
                self._slots = np.empty((self._num_slots, self._block_bytes), np.uint8)
            except MemoryError as error:
                raise StoreUnavailable(f"no {self._lru.budget_bytes} bytes of host memory", tier="host") from error
            self._free = list(range(self._num_slots - 1, -1, -1))

    def close(self) -> None:
        """See BlockTier; what was held is gone."""
        self._slots = None
        self._places.clear()
        for block_hash in self._lru.hashes():
            self._lru.drop(block_hash)

    def holds(self, block_hash: bytes) -> bool:
        """See BlockTier."""
        return block_hash in self._lru

    def wants(self, block_hash: bytes, num_bytes: int) -> bool:
        """See BlockTier."""
        wanted = num_bytes == self._block_bytes and self._lru.wants(block_hash, num_bytes)
        self.counters.num_refused += not wanted and block_hash not in self._lru
        return wanted

    def put(self, block_hash: bytes, block: memoryview, checksum: int) -> None:
        """See BlockTier."""
        if block_hash in self._lru:
            self._lru.use(block_hash)
            return
        if block.nbytes != self._block_bytes or block_checksum(block) != checksum:
            raise ValueError(f"no block of {self._block_bytes} bytes with checksum {checksum:016x}")
        for victim in self._lru.victims(self._block_bytes):
            self._drop(victim)
            self.counters.num_evicted += 1
        slot = self._free.pop()
        self._bytes(slot)[:] = np.frombuffer(block, np.uint8)
        self._places[block_hash] = slot, checksum
        self._lru.add(block_hash, self._block_bytes)
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
            self._drop(block_hash)
            return None
        self._lru.use(block_hash)
        self.counters.num_hits += 1
        return checksum

    def drain_events(self) -> TierEvents:
        """See BlockTier."""
        return TierEvents(*self._lru.drain())

    def _bytes(self, slot: int) -> NDArray[np.uint8]:
        if self._slots is None:
            raise StoreUnavailable("the host memory tier is not started", tier="host")
        row: NDArray[np.uint8] = self._slots[slot]
        return row

    def _drop(self, block_hash: bytes) -> None:
        self._lru.drop(block_hash)
        slot, _ = self._places.pop(block_hash)
        self._free.append(slot)
