"""Memory of a fixed size through which all blocks of a store node pass, between a transfer and the tiers."""

from __future__ import annotations

import asyncio

import numpy as np

from shared.errors import ConfigError


class Staging:
    """Slots of one block each. For the event loop's thread alone."""

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        """Allocates the memory; the system provides pages as they are written. Raises ConfigError (field staging_bytes)
        when not even one block fits."""
        self.num_slots = budget_bytes // block_bytes
        if self.num_slots == 0:
            raise ConfigError(
                f"staging_bytes is {budget_bytes} bytes, one block takes {block_bytes}",
                field="staging_bytes",
                limit=block_bytes,
            )
        self._memory = np.empty((self.num_slots, block_bytes), np.uint8)
        self._free = list(range(self.num_slots))
        self._given_back = asyncio.Event()

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes, writable."""
        return memoryview(self._memory[slot])

    def take(self, count: int) -> list[int]:
        """Takes up to `count` free slots, fewer if fewer are free."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    async def wait(self, count: int) -> list[int]:
        """Takes up to `count` slots, at least one; waits while none is free."""
        while not self._free:
            self._given_back.clear()
            await self._given_back.wait()
        return self.take(count)

    def give_back(self, slot: int) -> None:
        """Frees a slot."""
        self._free.append(slot)
        self._given_back.set()
