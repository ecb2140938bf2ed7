"""The linear layer of plain torch: a weight as the checkpoint has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class PlainLinear:
    """See `Linear`; its weight and bias are the caller's, neither copied nor changed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_size, in_size]; bias: [out_size] of the same dtype, or None."""
        self.weight = weight
        self.bias = bias

    @property
    def in_size(self) -> int:
        """See `Linear`."""
        return self.weight.shape[1]

    @property
    def out_size(self) -> int:
        """See `Linear`."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """See `Linear`."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`. On a CPU, 16-bit products are oneDNN's, which keeps some hundred KiB for every number of rows
        that it meets: there few different ones come, at most a quarter above those asked for."""
        num_rows = x.shape[0]
        added = 0 if x.device.type != "cpu" or x.dtype == torch.float32 else _padded(num_rows) - num_rows
        if not added:
            return functional.linear(x, self.weight, self.bias)
        return functional.linear(functional.pad(x, (0, 0, 0, added)), self.weight, self.bias)[:num_rows]


def _padded(num_rows: int) -> int:
    """Up to eight as they are, then multiples of eight, from 64 on four numbers for each power of two."""
    step = 1 if num_rows <= 8 else 1 << max(3, num_rows.bit_length() - 3)
    return -(-num_rows // step) * step


def make_plain_linear(weight: Tensor, bias: Tensor | None, *, own: bool) -> PlainLinear:  # noqa: ARG001
    """`DecoderOps.make_linear` of the backends that multiply by weights as they are."""
    return PlainLinear(weight, bias)
