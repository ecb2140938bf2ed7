"""Rounds groups of columns to the range of codes that costs their products the least."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import Piece, quantize_rows

_SHARES = tuple(1 - step / 20 for step in range(8))
"""Shares of a group's range that are tried: numbers beyond become the outermost codes, and the others are rounded
finely."""


def quantize_narrowed(
    weight: Tensor, spec: LinearSpec, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> Piece:
    """As `quantize_rows`, of fp32 [num_rows, in_size], with those shares of groups' ranges that leave the least error.

    `importance`: fp32 [in_size], by which the square of a column's error counts, such as its input's mean square;
    None: all count alike.
    """
    size = (len(weight), spec.num_groups(weight.shape[1]))
    best, least = torch.ones(size), torch.full(size, float("inf"))
    for share in _SHARES:
        shares = torch.full(size, share)
        error = (quantize_rows(weight, spec, scale_dtype, shares).dense() - weight).square()
        error = (error if importance is None else error * importance).view(*size, -1).sum(2)
        best, least = torch.where(error < least, shares, best), error.minimum(least)
    return quantize_rows(weight, spec, scale_dtype, best)
