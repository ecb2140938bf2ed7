"""Weights whose groups are of any columns: put in the order of the groups once, and x with them."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.backend import Linear
from shared.kernels.quantized import QuantizedWeight


class OrderedLinear:
    """See `Linear`: a weight whose columns were put in the order of their groups, and x with them."""

    def __init__(self, inner: Linear, order: Tensor) -> None:
        """order: [in_size] int64, the column of x that comes at each place."""
        self.inner = inner
        self._order = order
        self.in_size, self.out_size, self.dtype = inner.in_size, inner.out_size, inner.dtype
        self.nbytes = inner.nbytes + order.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.inner.forward(x.index_select(1, self._order))


def columns_of_group(weight: QuantizedWeight) -> int:
    """Columns that share a scale."""
    if weight.spec.index_groups:
        return weight.spec.group or weight.in_size
    return min(weight.spec.group or weight.in_size, weight.in_size)


def in_order(weight: QuantizedWeight) -> tuple[QuantizedWeight, Tensor] | None:
    """A weight with its columns in the order of their groups, and that order; the one given is freed. None where its
    parts have several, or a group does not have as many columns as the others."""
    assert weight.index is not None
    index, group = weight.index[0], columns_of_group(weight)
    if not bool((weight.index == index).all()):
        return None
    order = index.long().argsort(stable=True)
    if not index[order].equal(torch.arange(weight.in_size, dtype=torch.int32, device=index.device) // group):
        return None
    return weight.with_columns(order), order
