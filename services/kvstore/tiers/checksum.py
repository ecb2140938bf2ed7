"""Checksums of blocks of any size, on numpy alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.kv.checksum_weights import checksum_weights, weighted_sum


def block_checksum(block: memoryview) -> int:
    """The checksum of contiguous bytes. Raises ValueError if their number is not a multiple of 8."""
    words = np.frombuffer(block, np.uint64)
    return weighted_sum(words, _weights(len(words)))


@lru_cache(maxsize=4)
def _weights(num_words: int) -> NDArray[np.uint64]:
    """Cached: a store sees one block size, or a few."""
    return checksum_weights(num_words)
