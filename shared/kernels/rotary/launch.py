"""Launcher of Triton's fused head norm, rotation and KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView
from shared.kernels.rotary.jit import rotate_and_write_heads
from shared.kernels.rotary.reference import check_rotate_and_write

PROGRAM_ELEMENTS = 2048  # heads share a program up to this many


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: PoolView,
    layer: int,
    slots: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """`DecoderOps.rotate_and_write`. A token whose slot on the device is negative (it pads a captured batch) is
    rotated but written nowhere."""
    check_rotate_and_write(query, key, value, cos, sin, pool, layer, slots, q_norm, k_norm)
    for heads in (query, key, value):
        assert heads.stride(2) == 1
    for whole in (cos, sin, pool.memory, slots, q_norm, k_norm):
        assert whole is None or whole.is_contiguous()
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, elements = pool.num_kv_heads, pool.elements
    placed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return placed
    half = next_power_of_2(head_dim // 2)
    tile = min(next_power_of_2(num_heads), max(1, PROGRAM_ELEMENTS // (2 * half)))
    parts = -(-num_heads // tile) + -(-num_kv_heads // tile)
    rotate_and_write_heads[(num_tokens, parts)](
        query,
        key,
        value,
        cos,
        sin,
        q_norm,
        k_norm,
        placed,
        elements,
        pool.as_scales,
        slots,
        layer,
        num_heads,
        num_kv_heads,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        query.stride(1),
        key.stride(1),
        value.stride(1),
        elements.stride(0),
        eps,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pool.block_size,
        HALF=half,
        HEADS=tile,
        **devices.overlap(query.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return placed
