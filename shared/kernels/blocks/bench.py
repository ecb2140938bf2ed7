"""Whole blocks: how fast they are copied and checked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from shared.kernels.bench_case import Case
from shared.kernels.blocks.launch import block_checksums, gather_blocks, scatter_blocks

BLOCK_SHAPE = (32, 2, 8, 16, 128)  # an 8B model's: 2 MiB in 16 bits
NUM_BLOCKS = 512


def cases(
    device: torch.device, num_blocks: int = NUM_BLOCKS, block_shape: tuple[int, ...] = BLOCK_SHAPE
) -> Iterator[Case]:
    """All of a pool's blocks in random order, and the checksum of a few."""
    pool = torch.randn(num_blocks, *block_shape, device=device).bfloat16()
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(device)
    blocks = torch.empty_like(pool)
    label = f"{num_blocks} × {pool[:1].nbytes >> 10} KiB"
    yield Case("gather blocks", label, partial(gather_blocks, pool, order), 2 * pool.nbytes)
    yield Case("scatter blocks", label, partial(scatter_blocks, blocks, pool, order), 2 * pool.nbytes)
    yield Case("block checksums", label, partial(block_checksums, pool, order), pool.nbytes)
    few = order[: max(1, num_blocks // 64)]
    label = f"{len(few)} × {pool[:1].nbytes >> 10} KiB"
    yield Case("block checksums", label, partial(block_checksums, pool, few), pool[: len(few)].nbytes)
