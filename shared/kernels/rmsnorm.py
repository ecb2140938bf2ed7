"""Root mean square layer normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * (x / rms(x))`, the mean taken in fp32, the quotient rounded to x's dtype before the weight.

    That order of rounding is the one the checkpoints of the Llama family were trained and published with.

    Args:
        x: [..., size]; for a norm per head, [num_tokens, num_heads, head_dim].
        weight: [size], x's dtype.
        eps: added to the mean square.

    Returns:
        [..., size], x's dtype.
    """
    assert x.shape[-1:] == weight.shape
    assert x.dtype == weight.dtype
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [num_tokens, size], output of a block.
        residual: [num_tokens, size], x's dtype.
        weight: [size], x's dtype.
        eps: added to the mean square.

    Returns:
        (normed, new_residual), both [num_tokens, size]; neither argument is changed.
    """
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    new_residual = residual + x
    return rms_norm(new_residual, weight, eps), new_residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch reference of `rms_norm`, same arguments."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
