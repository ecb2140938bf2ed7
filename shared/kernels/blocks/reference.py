"""Whole blocks in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.kv.checksum import as_words
from shared.kv.checksum_weights import checksum_weights
from shared.kv.multilinear import exact_sum


def check_blocks(pool: Tensor, block_ids: Tensor) -> None:
    """Assert what `BlockOps` asks of a pool and of ids."""
    assert pool.dim() >= 2
    assert pool.is_contiguous()
    assert pool[:1].nbytes % 8 == 0
    assert block_ids.dim() == 1
    assert block_ids.dtype == torch.int64
    assert block_ids.device == pool.device


def check_scatter_blocks(blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """Assert what `BlockOps.scatter_blocks` asks of its arguments."""
    check_blocks(pool, block_ids)
    assert blocks.is_contiguous()
    assert blocks.dtype == pool.dtype
    assert blocks.device == pool.device
    assert blocks.shape == (block_ids.shape[0], *pool.shape[1:])


def check_key_sums(pool: Tensor, block_ids: Tensor, keys: Tensor) -> None:
    """Assert what `BlockOps.block_key_sums` asks of its arguments."""
    check_blocks(pool, block_ids)
    assert block_ids.is_contiguous()
    assert keys.dtype == torch.int64
    assert keys.shape == (pool[:1].nbytes // 8,)
    assert keys.device == pool.device


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """`BlockOps.gather_blocks`."""
    check_blocks(pool, block_ids)
    return pool.index_select(0, block_ids)


def scatter_blocks(blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """`BlockOps.scatter_blocks`."""
    check_scatter_blocks(blocks, pool, block_ids)
    pool.index_copy_(0, block_ids, blocks)


def block_checksums(pool: Tensor, block_ids: Tensor) -> Tensor:
    """`BlockOps.block_checksums`."""
    check_blocks(pool, block_ids)
    words = as_words(pool)
    weights = torch.from_numpy(checksum_weights(words.shape[1]).view(np.int64)).to(pool.device)
    return (words.index_select(0, block_ids) * weights).sum(dim=1)


def block_key_sums(pool: Tensor, block_ids: Tensor, keys: Tensor) -> Tensor:
    """`BlockOps.block_key_sums`."""
    check_key_sums(pool, block_ids, keys)
    words = as_words(pool).index_select(0, block_ids).cpu().numpy().view(np.uint64)
    factors = keys.cpu().numpy().view(np.uint64)
    totals = [exact_sum(row, factors) for row in words]
    parts = [[total >> 32 * part & 0xFFFFFFFF for part in range(3)] + [total >> 96] for total in totals]
    return torch.tensor(parts, dtype=torch.int64, device=pool.device).view(len(totals), 4)
