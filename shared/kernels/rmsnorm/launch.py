"""Launchers of Triton's RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.device import next_power_of_2
from shared.kernels.rmsnorm.jit import rms_norm_rows
from shared.kernels.rmsnorm.reference import check_add_rms_norm, check_rms_norm

MAX_SIZE = 65536  # elements of a row that a program's registers hold
PROGRAM_ELEMENTS = 2048  # short rows share a program up to this many


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False) -> Tensor:
    """`DecoderOps.rms_norm`, for rows of at most `MAX_SIZE`."""
    check_rms_norm(x, weight)
    if weight is None:
        return x
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, normed, None, eps, is_centered)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """`DecoderOps.add_rms_norm`, for rows of at most `MAX_SIZE`."""
    check_add_rms_norm(x, residual, weight)
    assert residual.is_contiguous()
    if weight is None:
        total = x + residual
        return total, total
    normed, new_residual = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, normed, new_residual, eps, is_centered)
    return normed, new_residual


def _launch(
    x: Tensor,  # [..., size]
    residual: Tensor | None,
    weight: Tensor,  # [size]
    normed: Tensor,
    new_residual: Tensor | None,
    eps: float,
    is_centered: bool,
) -> None:
    size = weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert 1 <= size <= MAX_SIZE
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    padded = next_power_of_2(size)
    rows = max(1, PROGRAM_ELEMENTS // padded)
    rms_norm_rows[(-(-num_rows // rows),)](
        x,
        residual,
        weight,
        normed,
        new_residual,
        num_rows,
        size,
        eps,
        ADDS=residual is not None,
        CENTERED=is_centered,
        ROWS=rows,
        SIZE=padded,
        **devices.overlap(x.device),
        num_warps=min(16, max(4, padded // 1024)),
        enable_fp_fusion=False,
    )
