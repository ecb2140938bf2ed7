"""Placing a step's queries, keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.pool_view import PoolView, assert_kv_dtype
from shared.kernels.rmsnorm.reference import rms_norm


def check_rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: PoolView,
    layer: int,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    """Assert what `DecoderOps.rotate_and_write` asks of its arguments."""
    num_tokens, _, head_dim = query.shape
    assert head_dim % 2 == 0
    assert cos.shape == sin.shape == (num_tokens, head_dim)
    assert query.dtype == cos.dtype == sin.dtype
    check_write_kv(key, value, pool, layer, slots)
    assert slots.shape == (num_tokens,)
    assert query.dtype == key.dtype
    assert pool.head_dim == head_dim
    for norm in (q_norm, k_norm):
        assert norm is None or norm.shape == (head_dim,)
        assert norm is None or norm.dtype == query.dtype


def check_write_kv(key: Tensor, value: Tensor, pool: PoolView, layer: int, slots: Tensor) -> None:
    """Assert what `write_kv` asks of its arguments."""
    assert pool.num_planes == 2
    assert 0 <= layer < pool.num_layers
    assert key.shape == value.shape == (slots.shape[0], pool.num_kv_heads, pool.head_dim)
    assert key.dtype == value.dtype
    assert_kv_dtype(key.dtype, pool.dtype)
    assert slots.dtype == torch.int64


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
    """`DecoderOps.rotate_and_write`."""
    check_rotate_and_write(query, key, value, cos, sin, pool, layer, slots, q_norm, k_norm)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    write_kv(rotate(key, cos, sin), value, pool, layer, slots)
    return rotate(query, cos, sin)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head.

    Args:
        heads: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, head_dim], the same dtype, both halves equal.
        sin: [num_tokens, head_dim], likewise.

    Returns:
        A new tensor of the same shape.
    """
    half = heads.shape[-1] // 2
    cos = cos[:, None, :half]
    sin = sin[:, None, :half]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(key: Tensor, value: Tensor, pool: PoolView, layer: int, slots: Tensor) -> None:
    """Write K and V of one layer into `pool`, in place.

    Args:
        key: [num_tokens, num_kv_heads, head_dim]; may be a strided view.
        value: [num_tokens, num_kv_heads, head_dim], key's dtype.
        pool: of two planes; K and V are rounded to its dtype.
        layer: 0 <= layer < num_layers.
        slots: [num_tokens] int64, block_id * block_size + offset, no two equal.
    """
    check_write_kv(key, value, pool, layer, slots)
    for plane, rows in enumerate((key, value)):
        pool.write(plane, layer, slots, rows)
