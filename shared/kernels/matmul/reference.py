"""The linear layer's product in plain torch: the definition that the kernel is held to."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x weight^T + bias`: [num_rows, in_size] to [num_rows, out_size], the weight [out_size, in_size]."""
    return functional.linear(x, weight, bias)
