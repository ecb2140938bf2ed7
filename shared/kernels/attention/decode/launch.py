"""Launcher of Triton's decode attention."""

from __future__ import annotations

import math

from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.decode.jit import decode_parts
from shared.kernels.attention.decode.schedule import plan_decode
from shared.kernels.attention.decode.splits import DecodeConfig
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView

MERGED_HEADS = 8
"""Heads whose parts are merged at once, at most."""
_MERGED = 8192
"""Elements that a merge reads at once."""


def merge_chunk(num_heads: int, dims: int) -> int:
    """Parts that a merge of this many heads reads at once."""
    return max(2, _MERGED // (num_heads * dims))


def decode_attention(
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
    config: DecodeConfig | None = None,
    queries: int = 1,
) -> None:
    """Fill the rows of `output` whose sequences have one query token, or up to `queries`; leave the others.

    The first call for a batch plans its schedule on the device, from `batch.query_start` and `batch.seq_lens`; the
    other layers' calls find it there. The grid follows from the number of sequences and the width of
    `batch.block_tables`. So a graph that captured the planning too may be replayed after those tensors changed in
    place. A row whose length on the device is 0 gets zeros.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous.
        pool: of two planes, whole.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences.
        output: [num_tokens, num_heads, head_dim], contiguous, query's dtype.
        scale: factor on query · key, above 0.
        window: sliding window in tokens, or None.
        softcap: as for `DecoderOps.paged_attention`, or None.
        sinks: likewise.
        is_chunked: likewise.
        config: sizes to use instead of `decode_config`'s.
        queries: a power of 2; several tokens of a sequence share one read of its keys and values.
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
    if batch.num_seqs == 0:
        return
    _, num_heads, head_dim = query.shape
    heads = (num_heads, pool.num_kv_heads, head_dim)
    plan = batch.remember(
        ("decode", heads, window, is_chunked, query.dtype, config, queries),
        lambda: plan_decode(batch, heads, window, query.dtype, config, is_chunked=is_chunked, queries=queries),
    )
    config = plan.config
    group = num_heads // pool.num_kv_heads
    dims = next_power_of_2(max(head_dim, 16))
    heads_at_once = min(next_power_of_2(group), MERGED_HEADS)
    decode_parts[(pool.num_kv_heads, plan.num_slots)](
        query,
        elements,
        pool.as_scales,
        batch.block_tables,
        plan.items,
        plan.tickets,
        output,
        plan.part_means,
        plan.part_peaks,
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
        ROWS=next_power_of_2(max(group * queries, 16)),
        DIMS=dims,
        TILE=config.tile,
        HEADS=heads_at_once,
        CHUNK=merge_chunk(heads_at_once, dims),
        QUERIES=queries,
        **devices.overlap(query.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
