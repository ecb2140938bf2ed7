"""Launcher of Triton's prefill attention."""

from __future__ import annotations

import math

from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.prefill.configs import PrefillConfig, prefill_config
from shared.kernels.attention.prefill.jit import prefill_tiles
from shared.kernels.attention.prefill.schedule import ANY, longest_chunk, plan_prefill
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView


def prefill_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
    config: PrefillConfig | None = None,
    uniform: bool = False,
    most: int = ANY,
) -> None:
    """Fill the rows of `output` whose sequences have two to `most` query tokens; leave the others.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        pool: of two planes, whole.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences; `query_lens` sizes the grid.
        output: [num_tokens, num_heads, head_dim], contiguous, query's dtype.
        scale: factor on query · key, above 0.
        window: sliding window in tokens, or None.
        softcap: as for `DecoderOps.paged_attention`, or None.
        sinks: likewise.
        is_chunked: likewise.
        config: sizes to use instead of `prefill_config`'s.
        uniform: fill all rows, in arithmetic that does not depend on where a chunk begins or ends: every tile of keys
            goes through the same code. A row whose length on the device is 0 gets zeros.
        most: of a sequence's query tokens, unless `uniform`.
    """
    check_paged_attention(query, pool, layer, batch, window, softcap, sinks, is_chunked=is_chunked)
    assert scale > 0
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert batch.block_tables.stride(1) == 1
    elements = pool.elements
    assert elements.stride(0) < 2**31
    longest = max(batch.query_lens, default=0) if uniform else longest_chunk(batch, most)
    if not longest:
        return
    _, num_heads, head_dim = query.shape
    group = num_heads // pool.num_kv_heads
    if config is None:
        config = batch.remember(
            ("prefill sizes", head_dim, group, query.dtype, most),
            lambda: prefill_config(
                head_dim, query.element_size(), longest * group, devices.device_limits(query.device)
            ),
        )
    rows = max(config.rows, next_power_of_2(group))
    tile_tokens = rows // group
    least = 1 if uniform else 2
    most = ANY if uniform else most
    plan = batch.remember(("prefill", tile_tokens, least, most), lambda: plan_prefill(batch, tile_tokens, least, most))
    prefill_tiles[(pool.num_kv_heads, plan.num_tiles)](
        query,
        elements,
        pool.as_scales,
        batch.block_tables,
        plan.items,
        output,
        layer,
        batch.block_tables.stride(0),
        elements.stride(0),
        scale * math.log2(math.e),
        sinks,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pool.block_size,
        WINDOW=window or 0,
        CHUNKED=is_chunked,
        CAP=(softcap or 0.0) * math.log2(math.e),
        ROWS=rows,
        DIMS=next_power_of_2(max(head_dim, 16)),
        TILE=config.tile,
        UNIFORM=uniform,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=not uniform,
    )
