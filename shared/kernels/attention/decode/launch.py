"""Launcher of Triton's decode attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.decode.jit import decode_parts, merge_parts
from shared.kernels.attention.decode.splits import DecodeConfig, decode_config, decode_grid
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2, num_multiprocessors

MERGE_CHUNK = 16  # parts that the merge reads at once


def decode_attention(
    query: Tensor,
    kv_blocks: Tensor,
    layer: int,
    batch: AttentionBatch,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
    config: DecodeConfig | None = None,
) -> None:
    """Fill the rows of `output` whose sequences have one query token; leave the others.

    Lengths come from `batch.query_start` and `batch.seq_lens` on the device; the grid follows from the number of
    sequences and the width of `batch.block_tables`. So a captured graph may be replayed after those tensors
    changed in place. A row whose length on the device is 0 gets zeros.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        kv_blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences.
        output: [num_tokens, num_heads, head_dim], contiguous, query's dtype.
        scale: factor on query · key.
        window: sliding window in tokens, or None.
        config: sizes to use instead of `decode_config`'s.
    """
    check_paged_attention(query, kv_blocks, layer, batch, window)
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert batch.block_tables.stride(1) == 1
    assert kv_blocks.stride(0) < 2**31
    num_seqs = batch.num_seqs
    if num_seqs == 0:
        return
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_blocks.shape[3:5]
    config = config or decode_config(head_dim, query.element_size())
    capacity = batch.block_tables.shape[1] * block_size
    if window is not None:
        capacity = min(capacity, window + config.tile)  # a window may begin anywhere in its first tile
    grid = decode_grid(num_seqs, capacity, num_kv_heads, num_multiprocessors(query.device), config)
    num_means = grid.num_slots if grid.has_merge else 0
    part_means = torch.empty((num_means, num_heads, head_dim), dtype=torch.float32, device=query.device)
    part_peaks = torch.empty((num_means, num_heads), dtype=torch.float32, device=query.device)
    sizes = {
        "HEAD_DIM": head_dim,
        "WINDOW": window or 0,
        "SEQS": next_power_of_2(num_seqs),
        "DIMS": next_power_of_2(max(head_dim, 16)),
        "TILE": config.tile,
        "MIN_TILES": config.min_tiles,
    }
    group = num_heads // num_kv_heads
    decode_parts[(num_kv_heads, grid.num_slots)](
        query,
        kv_blocks,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        output,
        part_means,
        part_peaks,
        layer,
        num_seqs,
        grid.num_items,
        batch.block_tables.stride(0),
        kv_blocks.stride(0),
        scale * math.log2(math.e),
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=next_power_of_2(max(group, 16)),
        **sizes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    if grid.has_merge:
        merge_parts[(num_heads, num_seqs)](
            part_means,
            part_peaks,
            batch.query_start,
            batch.seq_lens,
            output,
            num_seqs,
            grid.num_items,
            CHUNK=MERGE_CHUNK,
            **sizes,
            num_warps=4,
            enable_fp_fusion=True,
        )
