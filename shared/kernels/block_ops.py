"""A backend's ops on whole blocks. The rules for all ops are in `backend.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BlockOps(Protocol):
    """Whole blocks, between a pool and other memory of its device."""

    def gather_blocks(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        """Copy blocks out of a pool into one contiguous tensor.

        Args:
            pool: [num_blocks, …], contiguous, a block a multiple of 8 bytes.
            block_ids: [n] int64, each below num_blocks.

        Returns:
            [n, …], the pool's dtype.
        """
        ...

    def scatter_blocks(self, blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
        """Copy blocks into a pool: the opposite of `gather_blocks`.

        Args:
            blocks: [n, …], contiguous.
            pool: [num_blocks, …], contiguous, a block a multiple of 8 bytes, changed in place.
            block_ids: [n] int64, each below num_blocks, no two equal.
        """
        ...

    def block_checksums(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        """The checksum of `shared.kv.checksum` over each of some blocks.

        Args:
            pool: [num_blocks, …], contiguous, a block a multiple of 8 bytes.
            block_ids: [n] int64, each below num_blocks.

        Returns:
            [n] int64 with the bits of the unsigned checksum.
        """
        ...

    def block_key_sums(self, pool: Tensor, block_ids: Tensor, keys: Tensor) -> Tensor:
        """The exact sum of `shared.kv.multilinear` over each of some blocks: Σ words_i · keys_i of 64-bit words.

        Args:
            pool: [num_blocks, …], contiguous, a block a multiple of 8 bytes.
            block_ids: [n] int64, contiguous, each below num_blocks.
            keys: [words of a block] int64 with the bits of the unsigned keys.

        Returns:
            [n, 4] int64, none negative: a sum is that of its parts p times 2^(32 p).
        """
        ...
