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
        """See `Linear`."""
        return functional.linear(x, self.weight, self.bias)


def make_plain_linear(weight: Tensor, bias: Tensor | None, *, own: bool) -> PlainLinear:  # noqa: ARG001
    """`DecoderOps.make_linear` of the backends that multiply by weights as they are."""
    return PlainLinear(weight, bias)
