"""Launcher of Triton's matrix product, and the linear layer made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.device import DeviceLimits
from shared.kernels.linear import PlainLinear
from shared.kernels.matmul.jit import multiply_tiles


@dataclass(frozen=True)
class MatmulConfig:
    """Sizes that a launch is compiled for."""

    rows: int
    columns: int
    depth: int  # k of a step
    group: int  # row tiles that share a column tile
    num_warps: int
    num_stages: int


HALF = MatmulConfig(rows=64, columns=64, depth=64, group=1, num_warps=4, num_stages=3)
"""Sizes for 16 bits. 64 rows are the fewest that a warpgroup of compute capability 9.0 multiplies."""
MANY = MatmulConfig(rows=128, columns=256, depth=64, group=8, num_warps=8, num_stages=4)
"""For 9.0 alone: the same instruction, of 64 rows and a k of 16, with 256 columns in place of 64."""
FULL = MatmulConfig(rows=32, columns=32, depth=32, group=1, num_warps=4, num_stages=2)
"""Sizes for fp32, for tests of exactness."""


def matmul_config(num_rows: int, out_size: int, dtype: torch.dtype, limits: DeviceLimits) -> MatmulConfig:
    """Large tiles where they keep all multiprocessors busy. An element's sum is the same in all tiles of a dtype: k in
    the same steps, and within a step by an instruction of the same kind. The tests compare the bits on a GPU."""
    if dtype == torch.float32:
        return FULL
    tiles = -(-num_rows // MANY.rows) * -(-out_size // MANY.columns)
    return MANY if limits.arch == "sm_90" and tiles >= limits.num_multiprocessors else HALF


def check_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Asserts what the launchers of products with weights as they are have in common: shapes, dtypes, no strides."""
    in_size, out_size = x.shape[1], weight.shape[0]
    assert weight.shape == (out_size, in_size), f"{tuple(weight.shape)} for rows of {in_size}"
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    assert bias is None or (bias.shape == (out_size,) and bias.dtype == x.dtype and bias.is_contiguous())
    assert x.is_contiguous(), "x is strided"
    assert weight.is_contiguous(), "the weight is strided"


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, config: MatmulConfig | None = None) -> Tensor:
    """`x weight^T + bias` in fp32 sums, rounded once; a row's result depends on that row alone, to the bit.

    Args:
        x: [num_rows, in_size], contiguous.
        weight: [out_size, in_size], contiguous, x's dtype.
        bias: [out_size], x's dtype, or None.
        config: sizes to use instead of `matmul_config`'s.

    Returns:
        [num_rows, out_size], x's dtype.
    """
    check_product(x, weight, bias)
    (num_rows, in_size), out_size = x.shape, weight.shape[0]
    output = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    config = config or matmul_config(num_rows, out_size, x.dtype, devices.device_limits(x.device))
    multiply_tiles[(-(-out_size // config.columns) * -(-num_rows // config.rows),)](
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
        GROUP=config.group,
        EVEN=in_size % config.depth == 0,
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
