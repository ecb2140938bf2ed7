"""A keyed hash of a block's bytes at memory speed: Σ words_i · keys_i modulo the Mersenne prime 2^127 − 1.

Almost universal: for any two different blocks of one size, chosen without knowledge of the keys, the hashes are equal
for at most one of the 2^64 values of some key, so with a probability of at most 2^-64 (Carter and Wegman, "Universal
classes of hash functions", 1979). It is no MAC by itself: a sum tells about its keys. `TagSeal` passes it through a
keyed BLAKE2b, of which alone others see the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from shared.kv.block_memory import BlockMemory, Words, host_bytes, on_device

ExactSum = Callable[[Words, Words], int]
"""Σ a_i · b_i over two arrays of one length, as an exact integer."""

_PRIME = (1 << 127) - 1
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_CHUNK = 4096
"""Words whose products stay in a core's cache."""


def exact_sum(words: Words, keys: Words) -> int:
    """`ExactSum` by numpy, far below the memory's speed."""
    return sum(_sum_chunk(words[i : i + _CHUNK], keys[i : i + _CHUNK]) for i in range(0, len(words), _CHUNK))


def _sum_chunk(words: Words, keys: Words) -> int:
    total = 0
    for shift_a, a in ((0, words & _LOW), (32, words >> _HALF)):
        for shift_b, b in ((0, keys & _LOW), (32, keys >> _HALF)):
            product = a * b
            low, high = int((product & _LOW).sum()), int((product >> _HALF).sum())
            total += (low + (high << 32)) << (shift_a + shift_b)
    return total


class MultilinearHash:
    """Hashes blocks of one size; holds as many bytes of keys as a block has. A shorter one has the hash that it would
    have with zeros behind it: who compares must know its size."""

    def __init__(self, key: bytes, block_bytes: int, total: ExactSum = exact_sum) -> None:
        """`block_bytes` is a multiple of 8; `total` may be a faster one."""
        self._keys: Words = np.frombuffer(hashlib.shake_256(key).digest(block_bytes), np.dtype("<u8"))
        self._total = total

    def of(self, blocks: Sequence[BlockMemory]) -> list[bytes]:
        """16 bytes of each block; of blocks on a GPU by the GPU, all at once."""
        held = on_device(blocks)
        totals = map(self._sum, blocks) if held is None else held.sums.by_keys(held.block_ids, self._keys)
        return [(total % _PRIME).to_bytes(16, "little") for total in totals]

    def _sum(self, block: BlockMemory) -> int:
        words = np.frombuffer(host_bytes(block), np.dtype("<u8"))
        assert len(words) <= len(self._keys), f"a block of {8 * len(words)} bytes, not {8 * len(self._keys)}"
        return self._total(words, self._keys[: len(words)])
