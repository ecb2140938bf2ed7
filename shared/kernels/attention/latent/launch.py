"""Launcher of Triton's attention to latents, of single tokens and of the few of a short chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.decode.launch import merge_chunk
from shared.kernels.attention.decode.schedule import plan_decode
from shared.kernels.attention.decode.splits import DecodeConfig
from shared.kernels.attention.latent.jit import latent_parts, merge_latents
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import DeviceLimits, next_power_of_2
from shared.kernels.pool_view import PoolView

MERGED_HEADS = 4
"""Heads that a program joins the parts of. A program that attends has too many for it."""


@dataclass(frozen=True)
class LatentConfig:
    """Sizes that a launch is compiled for."""

    heads: int  # query heads of a program, which read the rows once
    decode: DecodeConfig


def latent_config(num_heads: int, dim: int, element_bytes: int, limits: DeviceLimits) -> LatentConfig:
    """Tiles of about 36 KiB, at a row of 576 elements in 16 bits 32 tokens; two lie in shared memory where they fit.

    On compute capability 9.0 two warpgroups multiply for 64 heads, where there are more than half as many: each has
    half of a row's values, 256 sums of 64 heads in 128 registers a thread.
    """
    tile = max(16, 1 << ((36 * 1024 // (dim * element_bytes)).bit_length() - 1))
    many = 64
    fits = 3 * many * dim * element_bytes <= limits.shared_bytes - 4 * 1024  # queries, and two tiles of as many rows
    if limits.arch == "sm_90" and element_bytes == 2 and num_heads > many // 2 and fits:
        return LatentConfig(many, DecodeConfig(many, 256 // many, 1, num_warps=8, num_stages=2))
    num_stages = 2 if 2 * tile * dim * element_bytes <= limits.shared_bytes - 24 * 1024 else 1
    return LatentConfig(16, DecodeConfig(tile, max(1, 256 // tile), 4, num_warps=4, num_stages=num_stages))


def suits(query: Tensor, pool: PoolView) -> bool:
    """Whether there is code for rows of this width: two pieces that fill a matrix instruction's depth; for one head."""
    return (pool.num_planes, pool.num_kv_heads) == (1, 1) and query.shape[2] > 16


def latent_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    config: LatentConfig | None = None,
) -> Tensor:
    """`DecoderOps.paged_attention` over a pool of one plane with one head, without a window.

    Each token is a sequence of its own here: the tokens of a chunk read their sequence's rows one after the other.
    Models expand latents for long chunks.

    Args:
        query: [num_tokens, num_heads, dim], contiguous.
        pool: of one plane with one head, whole, of no codes.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences.
        scale: factor on query · key.
        config: sizes to use instead of `latent_config`'s.

    Returns:
        [num_tokens, num_heads * dim], query's dtype.
    """
    check_paged_attention(query, pool, layer, batch, None)
    assert query.is_contiguous()
    assert suits(query, pool), f"rows of {query.shape[2]} elements beside {pool.num_kv_heads} heads"
    elements = pool.elements
    assert not pool.has_scales
    assert elements.stride(0) < 2**31
    num_tokens, num_heads, dim = query.shape
    output = torch.empty_like(query)
    if num_tokens == 0:
        return output.flatten(1)
    tokens = batch.remember("a sequence a token", lambda: by_token(batch))
    config = config or latent_config(num_heads, dim, query.element_size(), devices.device_limits(query.device))
    groups = -(-num_heads // config.heads)
    plan = tokens.remember(
        ("latents", num_heads, dim, query.dtype, config),
        lambda: plan_decode(tokens, (num_heads, groups, dim), None, query.dtype, config.decode),
    )
    first = 1 << (dim.bit_length() - 1)
    first = first // 2 if first == dim else first
    latent_parts[(groups, plan.num_slots)](
        query,
        elements,
        tokens.block_tables,
        plan.items,
        output,
        plan.part_means,
        plan.part_peaks,
        layer,
        tokens.block_tables.stride(0),
        elements.stride(0),
        scale * math.log2(math.e),
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_SIZE=batch.block_size,
        ROWS=config.heads,
        FIRST=first,
        REST=next_power_of_2(max(16, dim - first)),
        TILE=config.decode.tile,
        num_warps=config.decode.num_warps,
        num_stages=config.decode.num_stages,
    )
    if len(plan.part_means):
        dims = next_power_of_2(dim)
        merge_latents[(plan.num_slots, -(-num_heads // MERGED_HEADS))](
            plan.items,
            plan.part_means,
            plan.part_peaks,
            output,
            NUM_HEADS=num_heads,
            DIM=dim,
            HEADS=MERGED_HEADS,
            DIMS=dims,
            CHUNK=merge_chunk(MERGED_HEADS, dims),
            num_warps=4,
        )
    return output.flatten(1)


def by_token(batch: AttentionBatch) -> AttentionBatch:
    """The same tokens, each a sequence of its own that ends with it. The host gives the device nothing, and does not
    wait for it."""
    if max(batch.query_lens) == 1:
        return batch
    num_tokens, counts = batch.num_tokens, batch.query_start.diff()
    rows = torch.arange(num_tokens + 1, dtype=torch.int32, device=counts.device)
    # A token ends as far before its sequence as its row lies before the sequence's last.
    behind = (batch.query_start[1:] - 1).repeat_interleave(counts, output_size=num_tokens) - rows[:-1]
    pairs = zip(batch.query_lens, batch.kv_lens, strict=True)
    lens = tuple(kv_len - query_len + at for query_len, kv_len in pairs for at in range(1, query_len + 1))
    return AttentionBatch(
        query_start=rows,
        seq_lens=batch.seq_lens.repeat_interleave(counts, output_size=num_tokens) - behind,
        block_tables=batch.block_tables.repeat_interleave(counts, dim=0, output_size=num_tokens),
        slots=batch.slots,
        query_lens=(1,) * num_tokens,
        kv_lens=lens,
        block_size=batch.block_size,
    )
