"""RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rms_norm(x: Tensor, weight: Tensor | None) -> None:
    """Assert what `DecoderOps.rms_norm` asks of its arguments."""
    assert weight is None or x.shape[-1:] == weight.shape
    assert weight is None or x.dtype == weight.dtype


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None) -> None:
    """Assert what `DecoderOps.add_rms_norm` asks of its arguments."""
    check_rms_norm(x, weight)
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False) -> Tensor:
    """`DecoderOps.rms_norm`."""
    check_rms_norm(x, weight)
    if weight is None:
        return x
    wide = x.float()
    if is_centered:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """`DecoderOps.add_rms_norm`."""
    check_add_rms_norm(x, residual, weight)
    new_residual = residual + x
    return rms_norm(new_residual, weight, eps, is_centered=is_centered), new_residual
