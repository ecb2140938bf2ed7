"""Launchers of the products with weights in codes, and the linear layers made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels import device as devices
from shared.kernels.backend import Linear
from shared.kernels.coded.jit import multiply_codes, open_rows, round_rows, scale_sums
from shared.kernels.coded.layout import DEPTHS, GRANULE, TILE, CodedWeight, step_columns
from shared.kernels.device import DeviceLimits
from shared.kernels.opened import OpenedLinear
from shared.kernels.ordered import OrderedLinear, columns_of_group, in_order
from shared.kernels.quantized import QuantizedWeight

MOST_ROWS = 512
"""Rows of x from which on a weight is opened once and multiplied by cuBLAS, and whole numbers by torch: on an H100 both
ways take as long at 512."""
MOST_OPENED = 64 << 20
"""Bytes of a weight that are opened at a time; a multiple of them is never there."""
MOST_SPLITS = 16
FEWEST_STEPS = 4
"""Steps of a split."""
_TICKETS_A_GRANULE = 4
_SHARED_OF_MANY = 200 * 1024
"""Bytes of shared memory from which on tiles of more than 64 rows are taken."""
_ROUNDED = 4096
"""Elements of a row that are rounded at a time."""


@dataclass(frozen=True)
class CodedConfig:
    """Sizes that a launch is compiled for, and how many programs it aims at."""

    rows: int  # of x
    columns: int  # of the result, which divide TILE
    num_warps: int
    num_stages: int
    programs: int  # a multiprocessor, by splits


def coded_config(num_rows: int, weight: CodedWeight, dtype: torch.dtype, limits: DeviceLimits) -> CodedConfig:
    """Tiles by the number of rows and the kind of codes, as measured on an H200 (docs/benchmarks/engine/gpu.md).

    Few rows take as many programs as are at work at once and no more: a second turn of programs costs as much as the
    first. Groups have sums of their own, which leave no registers for tiles of many rows.
    """
    if dtype == torch.float32:  # for tests of exactness
        return CodedConfig(rows=16, columns=64, num_warps=4, num_stages=2, programs=2)
    num_stages = 4 if limits.shared_bytes > 100 * 1024 else 3 if limits.shared_bytes > 64 * 1024 else 2
    fewer_stages = min(num_stages, 3)
    if num_rows <= 16:
        if weight.kind != "int4":
            return CodedConfig(rows=16, columns=64, num_warps=4, num_stages=num_stages, programs=5)
        if num_rows <= 4:
            return CodedConfig(rows=16, columns=64, num_warps=2, num_stages=num_stages, programs=5)
        return CodedConfig(rows=16, columns=128, num_warps=4, num_stages=fewer_stages, programs=2)
    if num_rows <= 32:
        return CodedConfig(rows=32, columns=128, num_warps=4, num_stages=fewer_stages, programs=2)
    if num_rows <= 64 or weight.kind == "int4" or limits.shared_bytes < _SHARED_OF_MANY:
        # A step of several groups has sums of each, which four warps spill (not timed on a device).
        num_warps = 8 if 0 < weight.group < 64 else 4
        return CodedConfig(rows=64, columns=128, num_warps=num_warps, num_stages=fewer_stages, programs=2)
    if num_rows <= 128 or weight.group:
        return CodedConfig(rows=128, columns=64, num_warps=4, num_stages=3, programs=2)
    return CodedConfig(rows=256, columns=128, num_warps=8, num_stages=3, programs=1)


def multiply(
    x: Tensor,
    weight: CodedWeight,
    bias: Tensor | None,
    tickets: Tensor,
    *,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    config: CodedConfig | None = None,
) -> Tensor:
    """`x weight^T + bias` of codes opened in registers, summed in fp32.

    Args:
        x: [num_rows, in_size], contiguous; int8 where the weight is "whole".
        weight: its codes, scales and zeros.
        bias: [out_size], the result's dtype, or None.
        tickets: int32 of `num_tickets`, all 0 before and after. Launches that share them run one after another.
        row_scales: [num_rows] fp32, factors of the result's rows in front of the bias, or None.
        dtype: of the result; None: x's.
        config: other sizes than `coded_config` has.

    Returns:
        [num_rows, out_size].
    """
    num_rows, in_size = x.shape
    assert in_size == weight.in_size, f"rows of {in_size} for a weight of {weight.in_size} columns"
    assert x.is_contiguous(), "x is strided"
    assert bias is None or (
        bias.shape == (weight.out_size,) and bias.dtype == (dtype or x.dtype) and bias.is_contiguous()
    )
    assert row_scales is None or (row_scales.shape == (num_rows,) and row_scales.dtype == torch.float32)
    assert (x.dtype == torch.int8) == (weight.kind == "whole"), f"{x.dtype} times {weight.kind}"
    dtype = dtype or x.dtype
    output = torch.empty((num_rows, weight.out_size), dtype=dtype, device=x.device)
    if num_rows == 0:
        return output
    limits = devices.device_limits(x.device)
    config = config or coded_config(num_rows, weight, x.dtype, limits)
    assert TILE % config.columns == 0
    row_tiles, out_tiles = -(-num_rows // config.rows), -(-weight.out_size // config.columns)
    steps = weight.steps
    splits = 1
    if row_tiles * out_tiles <= tickets.numel():
        wanted = config.programs * limits.num_multiprocessors // (row_tiles * out_tiles)
        splits = max(1, min(wanted, steps // FEWEST_STEPS, MOST_SPLITS))
    steps_a_split = -(-steps // splits)
    splits = -(-steps // steps_a_split)
    parts = tickets if weight.kind == "whole" else weight.scales  # of the right dtype, where nothing is kept
    if splits > 1:
        size = (splits, row_tiles, out_tiles, config.rows, config.columns)
        parts = torch.empty(size, dtype=parts.dtype, device=x.device)
    multiply_codes[(row_tiles, out_tiles, splits)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        row_scales,
        bias,
        output,
        parts,
        tickets,
        num_rows,
        in_size,
        weight.out_size,
        weight.padded_size,
        steps,
        splits,
        steps_a_split,
        KIND=weight.kind,
        GROUP=weight.group,
        GRANULE=GRANULE,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=weight.depth,
        IS_WHOLE=in_size % weight.depth == 0,
        PTX=_knows_ptx(x.dtype, limits),
        STAGES=config.num_stages,
        **devices.overlap(x.device),
        num_warps=config.num_warps,
    )
    return output


def num_tickets(weight: CodedWeight) -> int:
    """Tickets of a launch that is split: more tiles than these fill a device anyway."""
    return _TICKETS_A_GRANULE * weight.padded_size // GRANULE


def open_weight(weight: CodedWeight, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows begin … end - 1 opened: [end - begin, in_size], rounded to `dtype`."""
    limits = devices.device_limits(weight.codes.device)
    output = torch.empty((end - begin, weight.in_size), dtype=dtype, device=weight.codes.device)
    open_rows[(weight.steps, -(-(end - begin) // GRANULE))](
        weight.codes,
        weight.scales,
        weight.zeros,
        output,
        begin,
        end - begin,
        weight.in_size,
        weight.padded_size,
        weight.steps,
        KIND=weight.kind,
        GROUP=weight.group,
        GRANULE=GRANULE,
        COLUMNS=GRANULE,
        DEPTH=weight.depth,
        PTX=_knows_ptx(dtype, limits),
        num_warps=4,
    )
    return output


def multiply_opened(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """As `multiply`, of the weight rounded to x's dtype, opened in parts."""
    at_once = max(GRANULE, MOST_OPENED // (weight.in_size * x.element_size()) // GRANULE * GRANULE)
    if at_once >= weight.out_size:
        return functional.linear(x, open_weight(weight, 0, weight.out_size, x.dtype), bias)
    output = torch.empty((x.shape[0], weight.out_size), dtype=x.dtype, device=x.device)
    for begin in range(0, weight.out_size, at_once):
        end = min(begin + at_once, weight.out_size)
        opened = open_weight(weight, begin, end, x.dtype).t()
        if bias is None:
            torch.mm(x, opened, out=output[:, begin:end])
        else:
            torch.addmm(bias[begin:end], x, opened, out=output[:, begin:end])
    return output


def round_to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of int8, kept in `dtype` [num_rows, in_size], and a scale of each row [num_rows] fp32, as `encode`."""
    num_rows, in_size = x.shape
    codes = torch.empty((num_rows, in_size), dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    round_rows[(num_rows,)](x, codes, scales, in_size, TILE=_ROUNDED, num_warps=8, enable_fp_fusion=False)
    return codes, scales


def multiply_whole(
    codes: Tensor, row_scales: Tensor, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As `multiply`, of x in codes of int8 and a weight whose rows are contiguous: sums of whole numbers, by torch."""
    sums = torch._int_mm(codes, weight.codes[: weight.out_size].t())
    output = torch.empty(sums.shape, dtype=dtype, device=codes.device)
    num_rows, out_size = sums.shape
    rows, columns = 8, 1024
    scale_sums[(-(-out_size // columns), -(-num_rows // rows))](
        sums, row_scales, weight.scales, bias, output, num_rows, out_size, ROWS=rows, COLUMNS=columns, num_warps=8
    )
    return output


def _knows_ptx(dtype: torch.dtype, limits: DeviceLimits) -> bool:
    return dtype != torch.float32 and limits.arch.startswith("sm_")


class CodedLinear:
    """See `Linear`: codes in memory, opened in registers for few rows, a part at a time for many. Calls that run at the
    same time, on several streams, are not safe."""

    def __init__(self, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype, *, rounds_input: bool) -> None:
        """`rounds_input`: rows of x are rounded to int8 first."""
        self.weight = weight
        self.bias = bias
        self.in_size, self.out_size, self.dtype, self.nbytes = weight.in_size, weight.out_size, dtype, weight.nbytes
        self._rounds_input = rounds_input
        self.tickets = torch.zeros(num_tickets(weight), dtype=torch.int32, device=weight.codes.device)

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`. For more than MOST_ROWS rows `scale * (code - zero)` is rounded to x's dtype, unless rows are
        rounded to int8."""
        is_many = x.shape[0] > MOST_ROWS
        if not self._rounds_input:
            if is_many:
                return multiply_opened(x, self.weight, self.bias)
            return multiply(x, self.weight, self.bias, self.tickets)
        is_whole = self.weight.kind == "whole"
        codes, scales = round_to_codes(x, torch.int8 if is_whole else self.dtype)
        if is_many and is_whole:
            return multiply_whole(codes, scales, self.weight, self.bias, self.dtype)
        return multiply(codes, self.weight, self.bias, self.tickets, row_scales=scales, dtype=self.dtype)


def make_coded_linear(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """`DecoderOps.make_quantized_linear` of Triton's backend. Groups of odd sizes, or of columns that several parts
    order each in its own way, are opened by torch at every call."""
    group = columns_of_group(weight)
    if step_columns(weight.spec.kind, 0 if group == weight.in_size else group) is None:
        return OpenedLinear(weight, bias, dtype)
    if weight.index is None:
        return _coded(weight, bias, dtype)
    ordered = in_order(weight)
    if ordered is None:
        return OpenedLinear(weight, bias, dtype)
    made, order = ordered
    return OrderedLinear(_coded(made, bias, dtype), order)


def _coded(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> CodedLinear:
    spec = weight.spec
    rounds = spec.rounds_input and dtype != torch.float32
    is_whole = rounds and spec.kind == "int8" and columns_of_group(weight) == weight.in_size and weight.zeros is None
    # torch multiplies whole numbers of such sizes.
    fits = weight.in_size % DEPTHS[0] == 0 and weight.out_size % 8 == 0
    return CodedLinear(CodedWeight.lay_out(weight, whole=is_whole and fits), bias, dtype, rounds_input=rounds)
