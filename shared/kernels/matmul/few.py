"""Launcher of the product of few rows, and the linear layer that takes it where it is faster than cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.device import DeviceLimits, next_power_of_2
from shared.kernels.linear import PlainLinear
from shared.kernels.matmul.few_jit import multiply_few
from shared.kernels.matmul.launch import check_product

MOST_ROWS = 64
"""Rows of x that are few."""
COLUMNS = 64
"""Columns of the smallest tile: rows of the weight that a warpgroup of compute capability 9.0 multiplies at once."""
_FEWEST_ROWS = 16
"""Fewest rows of a tile of x."""
_LEAST_FILLED = 0.7
"""Share of the programs that run at once which have work in the last turn too: below it cuBLAS is as fast."""


@dataclass(frozen=True)
class FewConfig:
    """Sizes that a launch is compiled for, and how many programs run at once."""

    columns: int  # of the result
    depth: int  # elements of k of a step
    num_warps: int
    num_stages: int
    programs: int  # that a multiprocessor has room for
    most_splits: int  # of k
    rows: range  # of x, for which it is the fastest where its programs are busy


WIDE = FewConfig(
    columns=128, depth=128, num_warps=4, num_stages=3, programs=2, most_splits=1, rows=range(17, MOST_ROWS + 1)
)
NARROW = FewConfig(columns=COLUMNS, depth=256, num_warps=4, num_stages=4, programs=1, most_splits=16, rows=range(1, 33))


def few_config(num_rows: int, in_size: int, out_size: int, limits: DeviceLimits) -> FewConfig | None:
    """Sizes as measured on an H100 (docs/benchmarks/engine/gpu.md); None where cuBLAS is as fast or nobody measured."""
    if limits.arch != "sm_90":
        return None
    for config in (WIDE, NARROW):
        if num_rows in config.rows and in_size % config.depth == 0 and out_size % config.columns == 0:
            programs = out_size // config.columns * splits_of(in_size, out_size, config, limits.num_multiprocessors)[0]
            at_once = config.programs * limits.num_multiprocessors
            if programs / (-(-programs // at_once) * at_once) >= _LEAST_FILLED:
                return config
    return None


def splits_of(in_size: int, out_size: int, config: FewConfig, num_multiprocessors: int) -> tuple[int, int]:
    """(splits of k, steps of each): as many splits as run at once."""
    steps, tiles = in_size // config.depth, out_size // config.columns
    splits = max(1, min(config.programs * num_multiprocessors // tiles, config.most_splits, steps))
    steps_a_split = -(-steps // splits)
    return -(-steps // steps_a_split), steps_a_split


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tickets: Tensor, config: FewConfig) -> Tensor:
    """`x weight^T + bias`, summed in fp32 and rounded once.

    Args:
        x: [num_rows, in_size], 1 <= num_rows, contiguous.
        weight: [out_size, in_size], contiguous, x's dtype; both sizes multiples of the config's.
        bias: [out_size], x's dtype, or None.
        tickets: int32 of at least out_size / columns, all 0 before and after. Launches that share them run one after
            another.
        config: as `few_config`.

    Returns:
        [num_rows, out_size], x's dtype.
    """
    check_product(x, weight, bias)
    (num_rows, in_size), out_size = x.shape, weight.shape[0]
    assert in_size % config.depth == 0
    assert out_size % config.columns == 0
    tiles = out_size // config.columns
    splits, steps_a_split = splits_of(in_size, out_size, config, devices.device_limits(x.device).num_multiprocessors)
    rows = max(_FEWEST_ROWS, next_power_of_2(num_rows))
    output = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    size = tiles * splits * config.columns * rows if splits > 1 else 1
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    multiply_few[(tiles * splits,)](
        x,
        weight,
        bias,
        output,
        parts,
        tickets,
        num_rows,
        in_size,
        out_size,
        in_size // config.depth,
        splits,
        steps_a_split,
        ROWS=rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        STAGES=config.num_stages,
        **devices.overlap(x.device),
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
    return output


class FewRowsLinear(PlainLinear):
    """See `Linear`; the weight is the caller's. Steps of few rows take the kernel where it is faster than cuBLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_size, in_size]; bias: [out_size] of the same dtype, or None."""
        super().__init__(weight, bias)
        self._tickets = torch.zeros(-(-weight.shape[0] // COLUMNS), dtype=torch.int32, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if 0 < x.shape[0] <= MOST_ROWS and x.dtype.itemsize == 2:  # noqa: SIM102  # asking the device takes a while
            if config := few_config(x.shape[0], self.in_size, self.out_size, devices.device_limits(x.device)):
                return multiply(x, self.weight, self.bias, self._tickets, config)
        return super().forward(x)


def make_few_rows_linear(weight: Tensor, bias: Tensor | None, *, own: bool) -> PlainLinear:  # noqa: ARG001
    """`DecoderOps.make_linear` of Triton's backend."""
    return FewRowsLinear(weight, bias)
