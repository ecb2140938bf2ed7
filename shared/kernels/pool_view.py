"""Some heads and layers of a pool, as a view of it: what a rank of a group reads and writes."""

from __future__ import annotations

from torch import Tensor


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
