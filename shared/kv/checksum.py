"""Checksum of a block: a weighted sum that a GPU computes at memory speed in any order.

Over a block's little-endian 64-bit words w_i:

    checksum = Σ w_i · (2·mix(i) + 1)  mod 2^64        mix(i) = splitmix64 of state i

Weights are odd, so a change of one word by any amount always shows, for instance a flipped bit. They differ from word
to word, so moved words show too (two swapped words stay undetected only if their difference times that of their mixes
is a multiple of 2^63). Addition commutes, so a kernel may sum in any order. The checksum guards against lost, torn and
misplaced writes, not against an adversary. splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kv.checksum_weights import checksum_weights, weighted_sum

_MASK = (1 << 64) - 1
_CUDA_CHUNK_BYTES = 64 << 20
"""Limit of scratch memory for one pass over many blocks on an accelerator."""


class BlockChecksum:
    """Checksums of blocks of `num_words` 64-bit words on one device; holds their weights, 8 bytes a word."""

    def __init__(
        self,
        num_words: int,
        device: torch.device | str = "cpu",
        weights: NDArray[np.uint64] | None = None,
    ) -> None:
        """`weights`: of some of a block's words, [num_words], where a pool holds those alone; the checksums of such
        parts add up to the block's, mod 2^64."""
        if num_words < 1:
            raise ValueError(f"num_words must be at least 1, not {num_words}")
        self.num_words = num_words
        self.device = torch.device(device)
        self._weights_host = checksum_weights(num_words) if weights is None else weights  # [num_words] uint64
        self._weights: torch.Tensor | None = None  # [num_words] int64 on the device
        if self.device.type != "cpu":
            self._weights = torch.from_numpy(self._weights_host.view(np.int64)).to(self.device)

    def checksum(self, block: torch.Tensor) -> int:
        """Checksum in [0, 2^64) of one contiguous block of `num_words * 8` bytes, any dtype and shape."""
        return self.checksum_blocks(block.reshape(1, -1), [0])[0]

    def checksum_blocks(self, pool: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
        """Current checksums of the given blocks of a contiguous `pool`, `[num_blocks, …]`.

        Raises ValueError for a pool on another device or with blocks of another size.
        """
        if pool.device.type != self.device.type:
            raise ValueError(f"pool is on {pool.device}, the checksum on {self.device}")
        words = as_words(pool)
        if words.shape[1] != self.num_words:
            raise ValueError(f"blocks of {words.shape[1]} words, expected {self.num_words}")
        if self._weights is None:
            rows = words.numpy().view(np.uint64)
            return [weighted_sum(rows[block_id], self._weights_host) for block_id in block_ids]
        sums: list[int] = []
        step = max(1, _CUDA_CHUNK_BYTES // (8 * self.num_words))
        for start in range(0, len(block_ids), step):
            index = torch.tensor(block_ids[start : start + step], device=self.device)
            sums += (words.index_select(0, index) * self._weights).sum(dim=1).tolist()
        return [value & _MASK for value in sums]


def as_words(pool: torch.Tensor) -> torch.Tensor:
    """A contiguous `[num_blocks, …]` tensor of any dtype as `[num_blocks, num_words]` int64, not copied."""
    if not pool.is_contiguous():
        raise ValueError("the pool must be contiguous")
    rows = pool.detach().reshape(pool.shape[0], -1).view(torch.uint8)
    if rows.shape[1] % 8:
        raise ValueError(f"a block has {rows.shape[1]} bytes, which is not a multiple of 8")
    return rows.view(torch.int64)
