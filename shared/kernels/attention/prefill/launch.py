"""Launcher of Triton's prefill attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.prefill.jit import prefill_tiles
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2


@dataclass(frozen=True)
class PrefillConfig:
    """Sizes that a launch is compiled for."""

    rows: int  # query heads times tokens of one tile
    tile: int  # keys of one step
    num_warps: int
    num_stages: int  # tiles of keys in flight


def prefill_config(head_dim: int, element_bytes: int, max_rows: int) -> PrefillConfig:
    """Tiles that fit the registers and shared memory of a multiprocessor.

    Args:
        head_dim: of a head.
        element_bytes: 2, or 4 for fp32, which has no matrix unit at full precision.
        max_rows: query heads times tokens of the batch's longest chunk for one KV head.
    """
    wide = head_dim > 128
    if element_bytes == 4:
        return PrefillConfig(rows=32 if wide else 64, tile=16 if wide else 32, num_warps=4, num_stages=2)
    if max_rows <= 64:
        return PrefillConfig(rows=64, tile=32 if wide else 64, num_warps=4, num_stages=3)
    return PrefillConfig(rows=128, tile=64 if wide else 128, num_warps=8, num_stages=2 if wide else 3)


def prefill_attention(
    query: Tensor,
    kv_blocks: Tensor,
    layer: int,
    batch: AttentionBatch,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
    config: PrefillConfig | None = None,
) -> None:
    """Fill the rows of `output` whose sequences have two query tokens or more; leave the others.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        kv_blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences; `query_lens` sizes the grid.
        output: [num_tokens, num_heads, head_dim], contiguous, query's dtype.
        scale: factor on query · key.
        window: sliding window in tokens, or None.
        config: sizes to use instead of `prefill_config`'s.
    """
    check_paged_attention(query, kv_blocks, layer, batch, window)
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert batch.block_tables.stride(1) == 1
    assert kv_blocks.stride(0) < 2**31
    chunks = [query_len for query_len in batch.query_lens if query_len > 1]
    if not chunks:
        return
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_blocks.shape[3:5]
    group = num_heads // num_kv_heads
    config = config or prefill_config(head_dim, query.element_size(), max(chunks) * group)
    rows = max(config.rows, next_power_of_2(group))
    num_tiles = sum(-(-query_len // (rows // group)) for query_len in chunks)
    prefill_tiles[(num_kv_heads, num_tiles)](
        query,
        kv_blocks,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        output,
        layer,
        batch.num_seqs,
        batch.block_tables.stride(0),
        kv_blocks.stride(0),
        scale * math.log2(math.e),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SEQS=next_power_of_2(batch.num_seqs),
        ROWS=rows,
        DIMS=next_power_of_2(max(head_dim, 16)),
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
