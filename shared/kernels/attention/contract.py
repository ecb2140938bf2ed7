"""What every backend's paged attention asserts of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import assert_kv_dtype, pool_sizes


def check_paged_attention(
    query: Tensor,
    kv_blocks: Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    part: bool = False,
) -> None:
    """Assert the shapes, dtypes and strides that `DecoderOps.paged_attention` promises. `part`: `kv_blocks` may be some
    heads and layers of a pool."""
    num_tokens, num_heads, head_dim = query.shape
    assert num_tokens == batch.num_tokens
    assert kv_blocks.dim() == 6
    assert kv_blocks.is_contiguous() or (part and pool_sizes(kv_blocks))
    assert_kv_dtype(query.dtype, kv_blocks.dtype)
    assert 0 <= layer < kv_blocks.shape[1]
    assert kv_blocks.shape[2] in (1, 2)
    assert num_heads % kv_blocks.shape[3] == 0
    assert kv_blocks.shape[4] == batch.block_size
    assert kv_blocks.shape[5] == head_dim
    assert window is None or window >= 1
    assert softcap is None or softcap > 0
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert kv_blocks.shape[2] == 2 or (softcap is None and sinks is None)
