"""A pool as kernels take it: which dtypes it may have, and views of some heads and layers, for a rank of a group."""

from __future__ import annotations

import torch
from torch import Tensor

KV_DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
"""Compute dtype → KV dtypes. K and V are rounded once, when they are written, and widened when they are read."""


def assert_kv_dtype(compute: torch.dtype, kv: torch.dtype) -> None:
    """For kernels, whose callers have checked it before."""
    assert kv in KV_DTYPES[compute], f"KV in {kv} beside {compute}"


def pool_sizes(kv_blocks: Tensor) -> tuple[int, int]:
    """(layers, KV heads) of a block of the pool, of which `kv_blocks` may be a part.

    kv_blocks: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], of adjacent layers and heads of
    a contiguous pool. Asserts these strides.
    """
    assert kv_blocks.dim() == 6
    if kv_blocks.is_contiguous():
        return kv_blocks.shape[1], kv_blocks.shape[3]
    of_block, of_layer, of_plane, of_head, of_token, of_number = kv_blocks.stride()
    block_size, head_dim = kv_blocks.shape[4:]
    assert (of_number, of_token, of_head) == (1, head_dim, block_size * head_dim), "a head of a block is strided"
    assert of_layer == kv_blocks.shape[2] * of_plane, "the pool is strided"
    return of_block // of_layer, of_plane // of_head
