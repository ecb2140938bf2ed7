"""Rotate query and key by their position (RoPE, Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + head_dim / 2) of each head: the half-split convention of Hugging Face weights.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim], query's dtype.
        cos: [num_tokens, head_dim], query's dtype, both halves equal.
        sin: [num_tokens, head_dim], likewise.

    Returns:
        (query, key) rotated, new tensors of the same shapes.
    """
    num_tokens, _, head_dim = query.shape
    assert head_dim % 2 == 0
    assert key.shape[0] == num_tokens
    assert key.shape[2] == head_dim
    assert cos.shape == sin.shape == (num_tokens, head_dim)
    assert query.dtype == key.dtype == cos.dtype == sin.dtype
    return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Torch reference for one of the two tensors: [num_tokens, num_heads, head_dim] rotated."""
    half = heads.shape[-1] // 2
    cos = cos[:, None, :half]
    sin = sin[:, None, :half]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
