"""Store a step's keys and values in their paged slots."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, kv_blocks: Tensor, layer: int, slots: Tensor) -> None:
    """Write K and V of one layer into `kv_blocks`, in place.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], the dtype of `kv_blocks`; may be a strided view.
        value: [num_tokens, num_kv_heads, head_dim].
        kv_blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        layer: 0 <= layer < num_layers.
        slots: [num_tokens] int64, block_id * block_size + offset, no two equal.
    """
    num_tokens = slots.shape[0]
    assert kv_blocks.dim() == 6
    assert kv_blocks.shape[2] == 2
    assert 0 <= layer < kv_blocks.shape[1]
    assert key.shape == value.shape == (num_tokens, kv_blocks.shape[3], kv_blocks.shape[5])
    assert key.dtype == value.dtype == kv_blocks.dtype
    assert slots.dtype == torch.int64
    write_kv_reference(key, value, kv_blocks, layer, slots)


def write_kv_reference(key: Tensor, value: Tensor, kv_blocks: Tensor, layer: int, slots: Tensor) -> None:
    """Torch reference of `write_kv`, same arguments."""
    block_size = kv_blocks.shape[4]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots % block_size
    # Two index tensors with a slice between them: the tokens become the leading dimension of the target.
    kv_blocks[blocks, layer, 0, :, offsets] = key
    kv_blocks[blocks, layer, 1, :, offsets] = value
