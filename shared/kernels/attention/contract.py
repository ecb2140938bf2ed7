"""What every backend's paged attention asserts of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView, assert_kv_dtype


def check_paged_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    part: bool = False,
    is_chunked: bool = False,
) -> None:
    """Assert the shapes, dtypes and strides that `DecoderOps.paged_attention` promises. `part`: `pool` may be some
    heads and layers of one."""
    num_tokens, num_heads, head_dim = query.shape
    assert num_tokens == batch.num_tokens
    assert part or pool.memory.is_contiguous()
    assert_kv_dtype(query.dtype, pool.dtype)
    assert 0 <= layer < pool.num_layers
    assert num_heads % pool.num_kv_heads == 0
    assert pool.block_size == batch.block_size
    assert pool.head_dim == head_dim
    assert window is None or window >= 1
    assert window is not None or not is_chunked
    assert softcap is None or softcap > 0
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert pool.num_planes == 2 or (softcap is None and sinks is None)
