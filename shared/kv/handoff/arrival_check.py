"""Checksums of blocks where they arrive: in host memory, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from shared.kv.checksum_weights import checksum_weights, weighted_sum

_AT_ONCE_BYTES = 64 << 10
"""Up to this many bytes are checked on the loop, within some 50 µs: a thread would take longer to wake."""


class ArrivalCheck:
    """Checksums of blocks of one size; holds their weights, 8 bytes a word."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is a multiple of 8."""
        self._block_bytes = block_bytes
        self._weights = checksum_weights(block_bytes // 8)

    async def of(self, blocks: Sequence[memoryview]) -> list[int]:
        """The blocks' checksums as they are now, each in [0, 2^64); nothing may write to them meanwhile.

        Once begun it runs to its end, also where the caller is cancelled: the memory must outlive that.
        """
        if len(blocks) * self._block_bytes <= _AT_ONCE_BYTES:
            return self._sums(blocks)
        return await asyncio.to_thread(self._sums, blocks)

    def _sums(self, blocks: Sequence[memoryview]) -> list[int]:
        return [weighted_sum(np.frombuffer(block, np.dtype("<u8")), self._weights) for block in blocks]
