"""Launcher of Triton's placed queries and written latents."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.latent import reference
from shared.kernels.latent.jit import place_latents
from shared.kernels.pool_view import PoolView

PROGRAM_ELEMENTS = 2048  # heads share a program up to this many


def rotate_and_write_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: PoolView,
    layer: int,
    slots: Tensor,
    *,
    norm: Tensor,
    eps: float,
    is_interleaved: bool,
) -> Tensor:
    """`DecoderOps.rotate_and_write_latent`. A token whose slot on the device is negative (it pads a captured batch) is
    rotated but written nowhere. Pools of codes go the way of the definition."""
    if pool.has_scales:
        return reference.rotate_and_write_latent(
            query, latent, cos, sin, pool, layer, slots, norm=norm, eps=eps, is_interleaved=is_interleaved
        )
    reference.check_rotate_and_write_latent(query, latent, cos, sin, pool, layer, slots, norm)
    assert query.stride(2) == latent.stride(1) == 1
    for whole in (cos, sin, pool.memory, slots, norm):
        assert whole.is_contiguous()
    num_tokens, num_heads, query_dim = query.shape
    rope_dim, elements = cos.shape[1], pool.elements
    placed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return placed
    heads = min(next_power_of_2(num_heads), max(1, PROGRAM_ELEMENTS // next_power_of_2(query_dim)))
    place_latents[(num_tokens, 1 + -(-num_heads // heads))](
        query,
        latent,
        cos,
        sin,
        norm,
        placed,
        elements,
        slots,
        layer,
        num_heads,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        elements.stride(0),
        eps,
        NOPE=query_dim - rope_dim,
        ROPE=rope_dim,
        RANK=norm.shape[0],
        BLOCK_SIZE=pool.block_size,
        HEADS=heads,
        KEPT=next_power_of_2(max(1, query_dim - rope_dim)),
        HALF=next_power_of_2(rope_dim // 2),
        SIZE=next_power_of_2(norm.shape[0]),
        IS_INTERLEAVED=is_interleaved,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return placed
