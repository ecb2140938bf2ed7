"""Weights in codes of 8 or 4 bits, in panels that the C++ kernels open in registers (source/codes.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.backend import Linear
from shared.kernels.cpu.linear import DTYPES, LANES, PANEL, Library, PackedLinear
from shared.kernels.ordered import OrderedLinear, columns_of_group, in_order
from shared.kernels.quantized import INT4_MIDDLE, QuantizedWeight, unpack_nibbles

_BITS = {"int8": 8, "int4": 4}
_PACKED_PANELS = 64
"""Panels that are laid out at a time."""


def fits_codes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernels read a weight's form and sizes: codes of integers, whole panels, groups of whole vectors."""
    out_size, in_size = weight.shape[-2:]
    group = columns_of_group(weight)
    return (
        weight.spec.kind in _BITS
        and not (weight.spec.has_lows and weight.spec.rounds_input)
        and dtype in DTYPES
        and out_size % PANEL == 0
        and group % LANES == 0
        and in_size % group == 0
    )


class CodedLinear(PackedLinear):
    """Panels of codes, uint8 [out_size / 32, bytes of a panel]."""

    def __init__(
        self, library: Library, panels: Tensor, bias: Tensor | None, in_size: int, dtype: torch.dtype, form: int
    ) -> None:
        """`form`: as in source/codes.h."""
        super().__init__(library, panels, bias, in_size, dtype)
        self._form = form

    @property
    def panel_stride(self) -> int:
        """See `PackedLinear`."""
        return self.panels.shape[1]

    @property
    def form(self) -> int:
        """See `PackedLinear`."""
        return self._form

    @classmethod
    def pack(cls, library: Library, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> CodedLinear:
        """Lays out a weight without an index, which satisfies `fits_codes`, and frees it."""
        bits, group = _BITS[weight.spec.kind], columns_of_group(weight)
        num_panels, has_zeros, has_lows = weight.out_size // PANEL, weight.zeros is not None, weight.spec.has_lows
        rounds = weight.spec.rounds_input and dtype != torch.float32
        lay_out = _rounded_panels if rounds else _panels
        head = (4 + (4 if has_lows else 2 if has_zeros else 0)) * PANEL
        stride = weight.in_size // group * (head + group * PANEL * bits // 8)
        panels = torch.empty((num_panels, stride), dtype=torch.uint8)
        for first in range(0, num_panels, _PACKED_PANELS):
            last = min(first + _PACKED_PANELS, num_panels)
            panels[first:last] = lay_out(weight.rows(first * PANEL, last * PANEL), bits, group)
        weight.free()
        form = bits + 16 * has_zeros + 32 * rounds + 64 * has_lows + 256 * group
        return cls(library, panels, bias, weight.in_size, dtype, form)


def _by_group(values: Tensor) -> Tensor:
    """[rows, groups] to bytes [num_panels, groups, bytes]."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _rounded_panels(weight: QuantizedWeight, bits: int, group: int) -> Tensor:
    """uint8 [num_panels, bytes]: see source/rounded.h."""
    num_groups = weight.in_size // group
    codes = unpack_nibbles(weight.codes) if bits == 4 else weight.codes.view(torch.uint8) ^ 128
    # A row's number is [half of the panel][row of it], a column's [group][4 k][k of these].
    ordered = codes.view(-1, 2, 16, num_groups, group // 4, 4).permute(0, 3, 4, 1, 2, 5).flatten(4)
    if bits == 4:
        ordered = ordered[..., 0, :] | ordered[..., 1, :] << 4
    parts = [_by_group(weight.scales)]
    if weight.zeros is not None:
        zeros = _by_group((weight.zeros + (0 if bits == 4 else 128)).to(torch.uint8))
        parts += [zeros, torch.zeros_like(zeros)]
    return torch.cat([*parts, ordered.flatten(2)], dim=2).flatten(1)


def _panels(weight: QuantizedWeight, bits: int, group: int) -> Tensor:
    """uint8 [num_panels, bytes]: see source/codes.h."""
    num_groups = weight.in_size // group
    codes = unpack_nibbles(weight.codes) if bits == 4 else weight.codes.view(torch.uint8)
    # A row's number is [half of the panel][run of 4][row of it], a column's [group][4 k][half of these][k of a pair].
    split = codes.view(-1, 2, 4, 4, num_groups, group // 4, 2, 2)
    ordered = split.permute(0, 4, 5, 6, 2, 1, 3, 7).flatten(4)  # [panels, groups, k / 4, 2, 64]
    if bits == 4:
        ordered = ordered[..., 0, :] | ordered[..., 1, :] << 4
    parts = [_by_group(weight.scales)]
    if weight.zeros is not None:
        middle = INT4_MIDDLE if bits == 4 else 0
        lows = weight.spec.has_lows
        moves = middle * weight.scales - weight.zeros if lows else (middle - weight.zeros).to(torch.bfloat16)
        parts.append(_by_group(moves))
    return torch.cat([*parts, ordered.flatten(2)], dim=2).flatten(1)


def coded_linear(library: Library, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear | None:
    """None where the kernels do not read this weight. Else it is freed."""
    if not fits_codes(weight, dtype):
        return None
    if weight.index is None:
        return CodedLinear.pack(library, weight, bias, dtype)
    ordered = in_order(weight)
    if ordered is None:
        return None
    made, order = ordered
    return OrderedLinear(CodedLinear.pack(library, made, bias, dtype), order)
