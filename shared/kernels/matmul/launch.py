"""Launcher of Triton's matrix product, and the linear layer made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.linear import PlainLinear
from shared.kernels.matmul.jit import multiply_tiles


@dataclass(frozen=True)
class MatmulConfig:
    """Sizes that a launch is compiled for."""

    rows: int
    columns: int
    depth: int  # k of a step
    num_warps: int
    num_stages: int


HALF = MatmulConfig(rows=64, columns=64, depth=64, num_warps=4, num_stages=3)
"""Sizes for 16 bits. 64 rows are the fewest that a warpgroup of compute capability 9.0 multiplies."""
FULL = MatmulConfig(rows=32, columns=32, depth=32, num_warps=4, num_stages=2)
"""Sizes for fp32, for tests of exactness."""


def matmul_config(dtype: torch.dtype) -> MatmulConfig:
    """A function of the dtype alone: were it one of the number of rows, so would be the order of sums."""
    return FULL if dtype == torch.float32 else HALF


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x weight^T + bias` in fp32 sums, rounded once; a row's result depends on that row alone, to the bit.

    Args:
        x: [num_rows, in_size], contiguous.
        weight: [out_size, in_size], contiguous, x's dtype.
        bias: [out_size], x's dtype, or None.

    Returns:
        [num_rows, out_size], x's dtype.
    """
    num_rows, in_size = x.shape
    out_size = weight.shape[0]
    assert weight.shape == (out_size, in_size), f"{tuple(weight.shape)} for rows of {in_size}"
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    assert bias is None or (bias.shape == (out_size,) and bias.dtype == x.dtype and bias.is_contiguous())
    assert x.is_contiguous(), "x is strided"
    assert weight.is_contiguous(), "the weight is strided"
    output = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    config = matmul_config(x.dtype)
    multiply_tiles[(-(-out_size // config.columns), -(-num_rows // config.rows))](
        x,
        weight,
        bias,
        output,
        num_rows,
        in_size,
        out_size,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return output


class RowwiseLinear(PlainLinear):
    """See `Linear`: each row's result depends on that row alone, to the bit."""

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return multiply(x, self.weight, self.bias)


def make_rowwise_linear(weight: Tensor, bias: Tensor | None, *, own: bool) -> RowwiseLinear:  # noqa: ARG001
    """`DecoderOps.make_linear` of the deterministic backend."""
    return RowwiseLinear(weight, bias)
