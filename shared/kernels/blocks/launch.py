"""Launchers of Triton's block copies and checksum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.kernels.blocks.jit import checksum_stretches, copy_blocks, key_sum_stretches
from shared.kernels.blocks.reference import check_blocks, check_key_sums, check_scatter_blocks
from shared.kv.checksum import as_words

COPY_TILE = 2048  # words of a program: 16 KiB
CHECKSUM_TILE = 512  # words a block at once
CHECKSUM_STRETCH = 8192  # words a block of a program: 64 KiB
CHECKSUM_BLOCKS = 4  # blocks of a program
KEY_SUM_TILE = 256  # words a block at once; four sums of each stay in registers


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """`BlockOps.gather_blocks`."""
    check_blocks(pool, block_ids)
    blocks = torch.empty((block_ids.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _copy(pool, blocks, block_ids, gathers=True)
    return blocks


def scatter_blocks(blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """`BlockOps.scatter_blocks`."""
    check_scatter_blocks(blocks, pool, block_ids)
    _copy(blocks, pool, block_ids, gathers=False)


def block_checksums(pool: Tensor, block_ids: Tensor) -> Tensor:
    """`BlockOps.block_checksums`."""
    check_blocks(pool, block_ids)
    return _sum_stretches(checksum_stretches, pool, block_ids, (), (), CHECKSUM_TILE)


def block_key_sums(pool: Tensor, block_ids: Tensor, keys: Tensor) -> Tensor:
    """`BlockOps.block_key_sums`."""
    check_key_sums(pool, block_ids, keys)
    return _sum_stretches(key_sum_stretches, pool, block_ids, (keys,), (4,), KEY_SUM_TILE)


def _sum_stretches(
    kernel: Any, pool: Tensor, block_ids: Tensor, more: tuple[Tensor, ...], parts: tuple[int, ...], tile: int
) -> Tensor:
    """[num_blocks, *parts] int64: what the kernel gives for each block's stretches, added. `more`: its arguments behind
    the ids; `parts`: of a sum."""
    assert block_ids.is_contiguous()
    words = as_words(pool)
    num_blocks, num_words = block_ids.shape[0], words.shape[1]
    num_stretches = -(-num_words // CHECKSUM_STRETCH)
    sums = torch.empty((num_blocks, num_stretches, *parts), dtype=torch.int64, device=pool.device)
    if num_blocks:
        kernel[(num_stretches, -(-num_blocks // CHECKSUM_BLOCKS))](
            words,
            block_ids,
            *more,
            sums,
            num_blocks,
            num_words,
            BLOCKS=CHECKSUM_BLOCKS,
            TILE=tile,
            STRETCH=CHECKSUM_STRETCH,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return sums.sum(dim=1)


def _copy(source: Tensor, target: Tensor, block_ids: Tensor, *, gathers: bool) -> None:
    """Between a pool and a contiguous tensor, both [any, …] of equal blocks."""
    assert block_ids.is_contiguous()
    num_blocks = block_ids.shape[0]
    if num_blocks == 0:
        return
    source_words, target_words = as_words(source), as_words(target)
    num_words = source_words.shape[1]
    grid = (num_blocks * -(-num_words // COPY_TILE),)
    copy_blocks[grid](
        source_words, target_words, block_ids, num_words,
        GATHERS=gathers, TILE=COPY_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
