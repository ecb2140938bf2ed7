"""Linear layers of plain torch over weights in fewer bits, whose codes are opened to fp32 part by part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.linear_spec import LinearSpec
from shared.kernels.pool_view import encode
from shared.kernels.quantized import OPEN_ELEMENTS, QuantizedWeight


class OpenedLinear:
    """See `Linear`; codes are opened to fp32 some rows at a time, whatever the device."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`weight`: a single one; `dtype`: of x and the result."""
        self.weight = weight
        self.bias = bias
        self.in_size, self.out_size, self.dtype, self.nbytes = weight.in_size, weight.out_size, dtype, weight.nbytes
        self._parts = weight.parts()

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = opened_product(rounded_input(x, self.weight.spec), self._parts)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


def rounded_input(x: Tensor, spec: LinearSpec) -> Tensor:
    """fp32 [num_rows, in_size] that a weight of this form is multiplied with; see `LinearSpec.rounds_input`."""
    if not spec.rounds_input or x.dtype == torch.float32:
        return x.float()
    codes, scales = encode(x, torch.int8)
    return codes.float() * scales[:, None]


def opened_product(x: Tensor, parts: Sequence[QuantizedWeight]) -> Tensor:
    """[num_rows, in_size] fp32 times the transposed parts, one behind the other."""
    step = max(1, OPEN_ELEMENTS // parts[0].in_size)
    found = [
        functional.linear(x, part.piece(first, min(first + step, part.out_size)).dense())
        for part in parts
        for first in range(0, part.out_size, step)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
