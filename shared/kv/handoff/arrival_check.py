"""Whether blocks are what they were where they were made: in the memory where they arrive, beside the event loop."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.kv.block_memory import BlockMemory, DeviceBytes, host_bytes
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.kv.fleet_key import HandoffSeal

AT_ONCE_BYTES = 64 << 10
"""Up to this many bytes are read on the loop, within some 50 µs: a thread would take longer to wake."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What its sender says of a block."""

    checksum: int
    tag: bytes = b""
    """By the hand-off's seal, where there is one."""


class ArrivalCheck:
    """Checks blocks of one size; holds a checksum's weights, 8 bytes a word."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is a multiple of 8."""
        self.block_bytes = block_bytes
        self._weights = checksum_weights(block_bytes // 8)

    async def sound(
        self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: HandoffSeal | None = None
    ) -> list[bool]:
        """Of each (block index, bytes, what was announced); nothing may write to the bytes meanwhile.

        Once begun it runs to its end, also where the caller is cancelled: the memory must outlive that.
        """
        if len(blocks) * self.block_bytes <= AT_ONCE_BYTES:
            return self._check(blocks, seal)
        return await asyncio.to_thread(self._check, blocks, seal)

    def checksum(self, block: BlockMemory) -> int:
        """In [0, 2^64). Of a block on a GPU by the GPU."""
        if isinstance(block, DeviceBytes):
            return block.checksum()
        return weighted_sum(np.frombuffer(block, np.dtype("<u8")), self._weights)

    def _check(self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: HandoffSeal | None) -> list[bool]:
        return [
            self.checksum(memory) == announced.checksum
            and (seal is None or hmac.compare_digest(seal.block_tags([(index, host_bytes(memory))])[0], announced.tag))
            for index, memory, announced in blocks
        ]
