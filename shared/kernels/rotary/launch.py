"""Launcher of Triton's fused head norm, rotation and KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.rotary.jit import rotate_and_write_heads
from shared.kernels.rotary.reference import check_rotate_and_write

PROGRAM_ELEMENTS = 2048  # heads share a program up to this many


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_blocks: Tensor,
    layer: int,
    slots: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """`DecoderOps.rotate_and_write`. A token whose slot on the device is negative (it pads a captured batch) is
    rotated but written nowhere."""
    check_rotate_and_write(query, key, value, cos, sin, kv_blocks, layer, slots, q_norm, k_norm)
    for heads in (query, key, value):
        assert heads.stride(2) == 1
    for whole in (cos, sin, kv_blocks, slots, q_norm, k_norm):
        assert whole is None or whole.is_contiguous()
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_blocks.shape[3:5]
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
        kv_blocks,
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
        kv_blocks.stride(0),
        eps,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=half,
        HEADS=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return placed
