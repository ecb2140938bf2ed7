"""Placing queries and writing latents in plain torch: the definition that the kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.pool_view import PoolView, assert_kv_dtype
from shared.kernels.rmsnorm.reference import rms_norm
from shared.kernels.rotary.reference import rotate


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
    """`DecoderOps.rotate_and_write_latent`."""
    check_rotate_and_write_latent(query, latent, cos, sin, pool, layer, slots, norm)
    rope_dim, rank = cos.shape[1], norm.shape[0]
    nope_dim = query.shape[2] - rope_dim

    def placed(heads: Tensor) -> Tensor:
        """[num_tokens, num_heads, rope_dim], rotated; the first of all pairs lie before the second."""
        if is_interleaved:
            heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)
        return rotate(heads, cos, sin)

    key = placed(latent[:, None, rank:])[:, 0]
    row = torch.cat((rms_norm(latent[:, :rank], norm, eps), key), dim=-1)
    pool.write(0, layer, slots, row[:, None])
    return torch.cat((query[..., :nope_dim], placed(query[..., nope_dim:])), dim=-1)


def check_rotate_and_write_latent(
    query: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, pool: PoolView, layer: int, slots: Tensor, norm: Tensor
) -> None:
    """Assert what `DecoderOps.rotate_and_write_latent` asks of its arguments."""
    num_tokens, _, query_dim = query.shape
    rope_dim = cos.shape[1]
    assert rope_dim % 2 == 0
    assert query_dim >= rope_dim
    assert cos.shape == sin.shape == (num_tokens, rope_dim)
    assert query.dtype == latent.dtype == cos.dtype == sin.dtype == norm.dtype
    assert norm.dim() == 1
    assert latent.shape == (num_tokens, norm.shape[0] + rope_dim)
    assert (pool.num_planes, pool.num_kv_heads, pool.head_dim) == (1, 1, latent.shape[1])
    assert 0 <= layer < pool.num_layers
    assert_kv_dtype(query.dtype, pool.dtype)
    assert slots.shape == (num_tokens,)
    assert slots.dtype == torch.int64
